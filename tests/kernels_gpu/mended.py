"""Triton's interpreter where it differs from a GPU in what the tests look at.

Its products go through BLAS, whose sums depend on a row's place among the others: here they are made in float64 and
rounded once. Its cast from float32 to bf16 cuts off: here it rounds to the nearest, ties to even. It also makes the
language over at every call of a function, which takes most of its time: here once a launch.
"""

from __future__ import annotations

import inspect

import numpy as np
import triton.language as tl
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

PLAIN_CAST = InterpreterBuilder.cast_impl


def mend() -> None:
    InterpreterBuilder.create_dot = create_dot
    InterpreterBuilder.cast_impl = cast_impl
    interpreter._patch_lang = patch_once


PATCH, patched = interpreter._patch_lang, set()


def patch_once(fn):
    """`_patch_lang` for what is not made over already."""
    wanted = {x.__name__ for x in fn.__globals__.values() if inspect.ismodule(x) and x in (tl, tl.core)}
    fresh = wanted - patched
    if not fresh:
        return interpreter._LangPatchScope()
    scope = PATCH(fn)
    patched.update(fresh)
    restore = scope.restore

    def undo():
        restore()
        patched.difference_update(fresh)

    scope.restore = undo
    return scope


def create_dot(self, a, b, d, input_precision, max_num_imprecise_acc):
    if a.dtype.scalar != tl.float32 or b.dtype.scalar != tl.float32:
        raise ValueError(f"the interpreter multiplies float32 rightly, not {a.dtype} and {b.dtype}")
    product = np.matmul(a.data, b.data, dtype=np.float64) + d.data
    return TensorHandle(product.astype(d.data.dtype), d.dtype.scalar)


def cast_impl(self, src, dst_type):
    if src.dtype.scalar == tl.float32 and dst_type.scalar == tl.bfloat16:
        bits = np.ascontiguousarray(src.data).view(np.uint32)
        rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & 1)) >> 16
        return TensorHandle(np.where(np.isnan(src.data), 0x7FC0, rounded).astype(np.uint16), tl.bfloat16)
    return PLAIN_CAST(self, src, dst_type)
