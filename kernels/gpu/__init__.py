"""The bf16 form's kernels: bf16 rows, float32 sums, one file an operation.

Every kernel keeps the row law: a row's bits depend on its own inputs alone, never on how many rows share the call or
where it stands among them. Block sizes across rows and output columns may follow the number of rows; what is summed,
and in which order, may not.
"""
