"""Comparisons that say enough to mend a kernel without another run: where two tensors part, and by how much."""

from __future__ import annotations

import torch
from torch import Tensor


def same(found: Tensor, expected: Tensor, *facts: object) -> None:
    """Bit for bit."""
    assert torch.equal(found, expected), parted(found, expected, *facts)


def near(found: Tensor, expected: Tensor, relative: float, absolute: float, *facts: object) -> None:
    """Every number within `absolute` and `relative` of the expected one."""
    error = (found.double() - expected.double()).abs()
    bad = ~(error <= absolute + relative * expected.double().abs())
    assert not bad.any(), parted(found, expected, *facts, bad=bad)


def parted(found: Tensor, expected: Tensor, *facts: object, bad: Tensor | None = None) -> str:
    """How many numbers differ, in which rows (of the first dimension), the first of them and the farthest."""
    said = f"{', '.join(map(str, facts))}: " if facts else ""
    if found.shape != expected.shape or (found.dtype != expected.dtype and bad is None):
        return f"{said}{found.dtype} {list(found.shape)} where {expected.dtype} {list(expected.shape)} was expected"
    if not found.dim():
        return f"{said}{found.item()} where {expected.item()} was expected"
    a, b = (x.detach().double().reshape(len(x), -1) for x in (found, expected))
    differ = a != b if bad is None else bad.reshape(len(a), -1)
    rows = differ.any(1).nonzero().flatten().tolist()
    row = rows[0]
    column = int(differ[row].nonzero()[0])
    columns = differ.any(0).nonzero().flatten()
    error = (a - b).abs().nan_to_num(0.0)
    worst = divmod(int(error.argmax()), error.shape[1])
    norm = float((a - b).norm() / b.norm())
    return (
        f"{said}{int(differ.sum()):,} of {differ.numel():,} numbers, {len(rows)} of {len(a)} rows differ: rows "
        f"{rows[:8]}, columns {int(columns[0])} to {int(columns[-1])} of {differ.shape[1]}; first [{row}, {column}] "
        f"{a[row, column].item():.9g} where {b[row, column].item():.9g} was expected; farthest {list(worst)} by "
        f"{float(error.max()):.4g} ({a[worst].item():.9g}, {b[worst].item():.9g}); |difference| / |expected| "
        f"{norm:.3g}; not finite: {int((~a.isfinite()).sum())} found, {int((~b.isfinite()).sum())} expected"
    )
