"""Which token a logits row gives: a pure function of (row, seed, absolute position).

Draws are counter-based: the noise of a token is a hash of (seed, position, token id), so the same row at the same
place gives the same token whether it was computed alone, in a draft's window or beside other streams. A draft is
accepted when it equals that draw. Everything here is float64 on the host; ties go to the lower id.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from tfmagic.errors import Refusal
from tfmagic.protocol import Params

from .cache.key import whole
from .drafting.draft import Likely, Walk, Window

COLDEST = 1e-6
"""Temperatures above zero are raised to at least this."""
MAX_TOKENS = 512
"""A reply's length when neither the request nor the checkpoint gives one."""


@dataclass(frozen=True)
class Sampling:
    """A request's parameters with every default filled in."""

    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    draft: str
    logprobs: int
    stop: list[str]
    stop_ids: frozenset[int]
    """Tokens that end a reply."""
    size: int
    """Token ids at or beyond it have no token and are never drawn."""

    @property
    def greedy(self) -> bool:
        return self.temperature == 0


def draw(row: np.ndarray, s: Sampling, seed: int, position: int) -> int:
    """The token of a logits row [V] float32 for the place `position` (rows before it). Raises FloatingPointError when
    the row is not finite."""
    row = row[: s.size]
    best = int(row.argmax())
    if not np.isfinite(row[best]):
        raise FloatingPointError("the model gave numbers that are not finite")
    if s.greedy:
        return best
    ids, scaled = candidates(row.astype(np.float64) / max(s.temperature, COLDEST), s)
    noisy = scaled + gumbel(seed, position, ids)
    return int(ids[noisy == noisy.max()].min())


class Draw(NamedTuple):
    """How the tokens of one window's rows are drawn."""

    sampling: Sampling
    seed: int
    position: int
    """The absolute place of the token drawn at row 0; a row of depth d draws for `position` + d."""


def walk(rows: np.ndarray, window: Window, by: Draw) -> Walk:
    """Walk a window from row 0 on, to the child whose guess equals the row's own draw, as long as there is one.

    rows [R, V] float32, the window's logits. A row that is not finite ends the walk before it.
    """
    children = {(parent, id): row for row, (id, parent) in reversed(list(enumerate(zip(window.ids, window.parents))))}
    path, ids, row = [], [], 0
    while row is not None:
        try:
            id = draw(rows[row], by.sampling, by.seed, by.position + len(ids))
        except FloatingPointError as error:
            return Walk(path, ids, str(error))
        path.append(row)
        ids.append(id)
        row = children.get((row, id))
    return Walk(path, ids)


def candidates(scaled: np.ndarray, s: Sampling) -> tuple[np.ndarray, np.ndarray]:
    """Ids and scaled logits left by top-k, then top-p (up to and with the token that crosses it), then min-p; by value
    descending, then id."""
    ids = np.arange(len(scaled))
    if 0 < s.top_k < len(scaled):
        least = np.partition(scaled, -s.top_k)[-s.top_k]
        ids = ids[scaled >= least]
    order = np.lexsort((ids, -scaled[ids]))
    ids = ids[order[: s.top_k or None]]
    scaled = scaled[ids]
    p = np.exp(scaled - scaled[0])
    total = np.cumsum(p)
    keep = (total - p < s.top_p * total[-1]) & (p >= s.min_p)
    keep[0] = True
    return ids[keep], scaled[keep]


def gumbel(seed: int, position: int | np.ndarray, ids: np.ndarray) -> np.ndarray:
    """Standard Gumbel noise, float64, one value a token id: splitmix64's mixer over seed, position and id in turn.
    Positions [..., 1] go with ids [..., n]."""
    with np.errstate(over="ignore"):
        x = mixed(np.uint64(seed % 2**64) + np.uint64(0x9E3779B97F4A7C15))
        x = mixed(x ^ np.asarray(position).astype(np.uint64) * np.uint64(0xD1342543DE82EF95))
        x = mixed(x ^ ids.astype(np.uint64))
    return -np.log(-np.log((x >> np.uint64(11)) * 2.0**-53 + 2.0**-54))


def mixed(x: np.ndarray) -> np.ndarray:
    """splitmix64's output function."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def likeliest(row: np.ndarray, s: Sampling, drawn: int) -> Likely | None:
    """Log probabilities of `drawn` and of the likeliest `s.logprobs` ids, of a logits row [V] float32; None where none
    are asked for."""
    if not s.logprobs:
        return None
    x = row[: s.size].astype(np.float64)
    x = x - x.max()
    x = x - np.log(np.exp(x).sum())
    count = min(s.logprobs, len(x))
    ids = np.flatnonzero(x >= np.partition(x, -count)[-count])
    return Likely(float(x[drawn]), [(int(id), float(x[id])) for id in ids[np.lexsort((ids, -x[ids]))[:count]]])


def derived_seed(key: Sequence[int]) -> int:
    """The seed of a request that gives none: a digest of its prompt, 63 bits, so that a repeated request repeats."""
    return int.from_bytes(whole(key)[:8], "big") >> 1


def fill(
    params: Params, generation: dict[str, Any], key: Sequence[int], context: int, size: int, drafter: bool = False
) -> Sampling:
    """Defaults from generation_config, ranges checked. `drafter`: whether the model has one. Raises Refusal naming the
    parameter and its range."""
    if len(key) + 1 > context:
        raise Refusal(
            f"The prompt has {len(key):,} tokens; with one token of reply that is over the context of {context:,}.",
            "Shorten it, or start a new conversation.",
        )

    def default(name: str, fallback: float) -> float:
        value = generation.get(name)
        return fallback if value is None else value

    heat = params.temperature
    if heat is None:
        heat = default("temperature", 1.0) if generation.get("do_sample") else 0.0
    top_p = default("top_p", 1.0) if params.top_p is None else params.top_p
    top_k = default("top_k", 0) if params.top_k is None else params.top_k
    min_p = default("min_p", 0.0) if params.min_p is None else params.min_p
    length = int(default("max_new_tokens", MAX_TOKENS)) if params.max_tokens is None else params.max_tokens
    check("temperature", heat, 0, 10)
    check("top_p", top_p, 0, 1, above=True)
    check("top_k", top_k, 0, 2**31)
    check("min_p", min_p, 0, 1)
    check("max_tokens", length, 1, 2**31)
    check("logprobs", params.logprobs, 0, 20)
    check_stops(params.stop)
    if params.seed is not None:
        check("seed", params.seed, 0, 2**63 - 1)
    if params.draft in ("block", "tree") and not drafter:
        fix = "Use draft on, copy or off."
        raise Refusal(f"draft {params.draft} needs a drafter, and this model has none.", fix)
    ends = generation.get("eos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    return Sampling(
        max_tokens=min(length, context - len(key)),
        temperature=float(heat),
        top_p=float(top_p),
        top_k=int(top_k),
        min_p=float(min_p),
        seed=derived_seed(key) if params.seed is None else params.seed,
        draft=params.draft,
        logprobs=params.logprobs,
        stop=list(params.stop),
        stop_ids=frozenset(ends),
        size=size,
    )


def check(name: str, value: float, low: float, high: float, above: bool = False) -> None:
    """Raises Refusal unless low <= value <= high (low < value when `above`)."""
    if not (low < value <= high if above else low <= value <= high):
        bounds = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise Refusal(f"{name} is {value}.", f"Give {name} a value {bounds}.")


def check_stops(stops: list[str]) -> None:
    if len(stops) > 16 or any(not stop or len(stop) > 256 for stop in stops):
        raise Refusal("stop holds too many strings, an empty one or one that is too long.",
                      "Give at most 16 strings of 1 to 256 characters.")  # fmt: skip
