"""The architectures: one folder each, one line here each.

A family object gives the engine what it needs of a model: see `qwen3_5.Model`, whose public names are the seam. A
family may have two forms of it, of the same names: `exact`, whose sums are exact, and `bf16`, which is made for a GPU.
"""

from __future__ import annotations

from importlib import import_module

from tfmagic.errors import Refusal

FAMILIES = {"qwen3_5": "tfmagic.engine.families.qwen3_5"}
"""`model_type` of config.json -> the module whose `Model(checkpoint, device, context, kv)` runs it exactly, and whose
`gpu` folder has the same of its bf16 form."""
FORMS = ("exact", "bf16")
KV = ("bf16", "fp8")
CAPABLE = (9, 0)
"""The least compute capability that the bf16 form's kernels are written for: Hopper."""


def load(checkpoint, device, context: int | None = None, form: str | None = None, kv: str = "bf16"):
    """The model of a checkpoint, weights read and ready. Raises Refusal naming what does not fit.

    `form`: as `chosen_form` takes it. `kv`: what keys and values are held in, one of `KV`; the exact form's own is
    finer than bf16 and stands for it.
    """
    module = checkpoint.choose(FAMILIES)
    form = chosen_form(form, device)
    if kv not in KV:
        raise Refusal(f"The KV cache cannot be held in {kv!r}.", f"Use --kv-cache {' or '.join(KV)}.")
    return import_module(module + ".gpu" * (form == "bf16")).Model(checkpoint, device, context, kv)


def chosen_form(form: str | None, device) -> str:
    """The numeric form, one of `FORMS`, on a torch device; None: bf16 where its kernels run, else exact. Raises Refusal
    for one that there is not, or that cannot run there."""
    import torch

    if form not in (*FORMS, None):
        raise Refusal(f"There is no numeric form {form!r}.", f"Use {' or '.join(FORMS)}.")
    if torch.device(device).type != "cuda":
        return form or "exact"
    capability = torch.cuda.get_device_capability(device)
    if capability >= CAPABLE:
        return form or "bf16"
    if form == "bf16":
        needs, has = dotted(CAPABLE), dotted(capability)
        problem = f"The bf16 form needs a GPU of compute capability {needs} or more; {device} has {has}."
        raise Refusal(problem, "Use --form exact.")
    return "exact"


def dotted(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))
