"""The static memory plan: what the device has is given out once, at start."""

from __future__ import annotations

import torch

from ..config import Text
from .pool import Plan, page_bytes, pages_for, slot_bytes

SEQUENCES = 18
"""Sixteen streams, a prompt that is settled, and one to spare."""
SHARE = 0.8
"""Of what is free beside the weights: pages; the rest are states that wait, pictures and the passes' own rows."""
PASSES = 6 << 30
"""Bytes that are left to the passes and pictures, at least, on a GPU."""
HOST = 512 << 20
"""Bytes of all of it where the device is a CPU, which runs this form for tests."""


def plan(t: Text, device: torch.device, context: int, kv: str, sequences: int = SEQUENCES) -> Plan:
    """Raises MemoryError when not even one sequence of `context` rows fits beside the weights."""
    longest = pages_for(context) + 1
    if device.type == "cuda":
        free = torch.cuda.mem_get_info(device)[0] - PASSES
    else:
        free = HOST
    free -= (sequences + 1) * slot_bytes(t)
    most = 1 + (sequences + 1) * longest
    pages = min(int(SHARE * free) // page_bytes(t, kv), most)
    if pages < 1 + pages_for(min(context, 4096)):
        raise MemoryError(f"{device} has {max(free, 0) / 2**30:.1f} GiB free beside the weights, which is too little")
    return Plan(sequences + 1, pages, longest, views=max(0, free - pages * page_bytes(t, kv)) // 2, kv=kv)


def described(plan: Plan, t: Text, weights: int, workspace: int) -> str:
    """In words, one line; sizes in bytes."""
    parts = {
        "weights": weights,
        f"{plan.pages:,} pages of 512 rows in {plan.kv}": plan.pages * page_bytes(t, plan.kv),
        f"{plan.slots} recurrent states": plan.slots * slot_bytes(t),
        "workspace": workspace,
        "states that wait, up to": plan.views,
    }
    return ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in parts.items())
