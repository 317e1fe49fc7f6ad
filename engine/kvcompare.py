"""What keys and values in fp8 change: the same text through a model twice, teacher-forced, compared row by row.

Each form reads the text by the prompt pass, the true tokens whatever it would have said. A row's last residual is kept,
and the head, which is the same in both forms, turns both into distributions: text of any length costs little memory.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tfmagic import protocol
from tfmagic.errors import Refusal

from . import families
from .checkpoint import Checkpoint, resolve
from .open import chosen
from .prompt import TextSide

EDGES = (0, 64, 256, 1024, 4096, 16384, 65536, 262144)
"""Positions at which a bucket begins."""
SLICE = 512
"""Rows of a prompt pass."""
BATCH = 64
"""Rows whose distributions are held at once."""


class Row(NamedTuple):
    """A position's prediction of the next token."""

    agree: Tensor
    """bool [n]: both forms find the same token likeliest."""
    kl: Tensor
    """float64 [n]: KL divergence of fp8's distribution from the ordinary one, nats."""
    loss: Tensor
    """float64 [n]: -log of what the ordinary form gives the token that comes, nats."""
    loss_fp8: Tensor


class Bucket(NamedTuple):
    """The rows at positions first, ... last."""

    first: int
    last: int
    rows: int
    agreement: float
    """Share of the rows whose likeliest token is the same."""
    kl: float
    worst: float
    """The mean and the largest KL divergence, nats."""
    loss: float
    loss_fp8: float


def compare(
    model: str | None,
    text: str | None = None,
    device: str = "auto",
    rows: int = 1024,
    form: str | None = None,
    progress: Callable[[str], None] = lambda what: None,
) -> list[Bucket]:
    """The buckets of a text of at most `rows` tokens; None: conversations of the shipped model's own kind.

    `model`, `device` and `form` as `open` takes them. Raises Refusal.
    """
    checkpoint, device = Checkpoint(resolve(model)), chosen(device)
    side = TextSide(checkpoint)
    ids = (side.encode(text) if text is not None else conversations(side, rows))[:rows]
    if len(ids) < 2:
        raise Refusal(f"The text has {len(ids)} tokens.", "Give at least 2.")
    ordinary = residuals(checkpoint, device, form, "bf16", ids, progress)[0]
    gc.collect()
    if device != "cpu":
        torch.cuda.empty_cache()  # the second form is planned by what is free
    fp8, last = residuals(checkpoint, device, form, "fp8", ids, progress)
    progress("comparing")
    size = min(last.vocab, side.tokenizer.get_vocab_size(with_added_tokens=True))
    found = [
        row(*(last.logits(x[at : at + BATCH])[:, :size] for x in (ordinary, fp8)), ids[at + 1 : at + BATCH + 1])
        for at in range(0, len(ids) - 1, BATCH)
    ]
    return buckets(Row(*(torch.cat(parts).cpu() for parts in zip(*found))))


def residuals(checkpoint: Checkpoint, device: str, form: str | None, kv: str, ids: list[int], progress: Callable):
    """The last layer's rows [len(ids) - 1, D] of every token but the last, and the model."""
    progress(f"reading {checkpoint.name}, keys and values in {kv}")
    model = families.load(checkpoint, device, None, form, kv)
    if len(ids) > model.context:
        fix = f"Give --rows {model.context} or fewer."
        raise Refusal(f"{checkpoint.name} reads {model.context:,} tokens at most, and the text has {len(ids):,}.", fix)
    model.tap([model.depth - 1])
    state, rows, ids = model.new_state(), [], ids[:-1]
    positions, _ = model.positions(ids, [])
    for at in range(0, len(ids), SLICE):
        progress(f"{kv}: {at:,} of {len(ids):,} rows")
        part = state, ids[at : at + SLICE], {}, positions[:, at : at + SLICE], []
        rows.append(model.prompt_passes([part])[0][2].clone())
    return torch.cat(rows), model


def row(a: Tensor, b: Tensor, following: list[int]) -> Row:
    """a, b float32 [n, V], the ordinary and the fp8 form's logits; `following` the n tokens that come next, or fewer,
    as the text ends."""
    n = len(following)
    a, b = (torch.log_softmax(x[:n].double(), -1) for x in (a, b))
    next = torch.tensor(following, device=a.device)[:, None]
    kl = (a.exp() * (a - b)).sum(-1).clamp_(min=0)
    return Row(a.argmax(-1) == b.argmax(-1), kl, -a.gather(1, next)[:, 0], -b.gather(1, next)[:, 0])


def buckets(rows: Row) -> list[Bucket]:
    out = []
    for first, end in zip(EDGES, (*EDGES[1:], len(rows.kl))):
        part = Row(*(x[first:end].double() for x in rows))
        if n := len(part.kl):
            agree, kl, *losses = (float(x.mean()) for x in part)
            out.append(Bucket(first, first + n - 1, n, agree, kl, float(part.kl.max()), *losses))
    return out


def table(found: list[Bucket]) -> list[str]:
    """Lines of text: every bucket, and all rows together."""
    n = sum(b.rows for b in found)
    agree, kl, _, *losses = (sum(b.rows * b[i] for b in found) / n for i in range(3, 8))
    whole = Bucket(0, n - 1, n, agree, kl, max(b.worst for b in found), *losses)
    lines = ["positions            rows   same top-1    KL mean   KL worst   loss bf16    loss fp8"]
    for name, b in [*((f"{b.first:,} - {b.last:,}", b) for b in found), ("all", whole)]:
        kl = f"{b.kl:10.2e} {b.worst:10.2e}"
        lines.append(f"{name:17s} {b.rows:7,}   {b.agreement:10.2%} {kl}  {b.loss:10.4f}  {b.loss_fp8:10.4f}")
    return lines


def conversations(side: TextSide, rows: int) -> list[int]:
    """At least `rows` tokens of tiny stories and questions about them, in the model's own chat template; the same every
    time."""
    from .embedded import talk, words

    draw, known = random.Random(4), words.Words({"words": words.THINGS})
    ids: list[int] = []
    while len(ids) < rows:
        messages = []
        for asked, said, _ in talk.story(draw, known) + talk.story(draw, known):
            messages += [protocol.Message(*turn) for turn in (("user", [protocol.Text(asked)]),
                                                              ("assistant", [protocol.Text(said)]))]  # fmt: skip
        ids += side.render(messages)
    return ids


def read_text(path: str | None) -> str | None:
    """The text of a file. Raises Refusal."""
    if path is None:
        return None
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}.", "Name a text file.") from None
    except UnicodeDecodeError:
        raise Refusal(f"{path} is not UTF-8 text.", "Name a text file.") from None
