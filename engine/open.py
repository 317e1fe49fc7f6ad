"""Opening a model: from a name to an engine that takes requests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import psutil

from tfmagic import protocol
from tfmagic.errors import Refusal

from . import sampling
from .cache.holdings import shelves
from .cache.store import Store
from .checkpoint import Checkpoint, resolve
from .loop import Engine
from .prompt import Limits, Prompt, TextSide, build
from .settling import beginning

PROBES = "a", "\n\nb"
"""Next turns that begin differently: what their prompts share, every next turn's prompt begins with."""


@dataclass
class Settings:
    prompt_cache_gib: float = 1.0
    """Memory for kept states; 0: none are kept."""
    context: int | None = None
    """The longest prompt and reply together, tokens; None: the checkpoint's own."""
    learn_conversations: bool = False
    """Keep the states of conversations on disk."""
    spill_gib: float = 0.0
    """Disk for states that memory has no room for any more; 0: they are dropped."""
    learn_dir: str | None = None
    """Where states on disk are kept; None: in the user's cache directory."""
    learn_gib: float = 32.0
    """Disk for the states of conversations, all models together."""
    learn_min_free_gib: float = 4.0
    """Disk that is left free."""
    learn_daily_gib: float = 64.0
    """What may be written to disk a day."""

    @property
    def disk(self) -> bool:
        return self.learn_conversations or self.spill_gib > 0


class Opened:
    """A model that is ready. `prepare` and `sampling` may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint, model, device: str, engine: Engine, text: TextSide):
        self.name, self.device, self.context = checkpoint.name, device, model.context
        self.text, self.engine = text, engine
        self._model, self._generation, self._config = model, checkpoint.generation, checkpoint.config
        self._size = min(model.vocab, text.tokenizer.get_vocab_size(with_added_tokens=True))

    def prepare(self, messages: list[protocol.Message], encoded: Mapping[str, bytes]) -> Prompt:
        """The prompt's rows. Raises Refusal naming what is wrong with the conversation or its images."""
        return build(messages, encoded, self.text, self._model, Limits())

    def settle(self, messages: list[protocol.Message], encoded: Mapping[str, bytes], label: str) -> None:
        """Let the engine compute, while it is idle, what any next turn of this conversation will begin with. Any
        thread. `messages` end with the reply; `label` names its turn. Raises Refusal as `prepare` does."""
        turns = (protocol.Message("user", [protocol.Text(text)]) for text in PROBES)
        self.engine.settle(beginning(*(self.prepare([*messages, turn], encoded) for turn in turns)), label)

    def kept(self) -> tuple[list[protocol.Shelf], list[protocol.KeptState]]:
        """What is kept where. Any thread."""
        return shelves(self.engine.store)

    def clear(self, wake: Callable[[], None], seconds: float = 10.0) -> None:
        """Forget every kept state, in memory and on disk; `wake` makes the engine take a step. Any thread but the
        engine's. Raises OSError."""
        done = self.engine.clear()
        wake()
        done.wait(seconds)
        if self.engine.store.disk is not None:
            self.engine.store.disk.clear()

    def close(self, seconds: float) -> None:
        """Finish, for at most so long, what is still to be written to disk."""
        if self.engine.store.disk is not None:
            self.engine.store.disk.close(seconds)

    def sampling(self, params: protocol.Params, prompt: Prompt) -> sampling.Sampling:
        """Defaults filled in from the checkpoint's generation_config. Raises Refusal for a value out of range and for
        a prompt that leaves no room for a reply."""
        generation = dict(self._generation)
        generation.setdefault("eos_token_id", (self._config.get("text_config") or self._config).get("eos_token_id"))
        return sampling.fill(params, generation, prompt.key, self.context, self._size)


def open(
    model: str | None,
    device: str,
    settings: Settings,
    emit: Callable[[protocol.Event], None],
    progress: Callable[[str], None] = lambda what: None,
) -> Opened:
    """Read a model and make it ready: `model` as `checkpoint.resolve` takes it; `device` "auto", "cpu" or "cuda:N".

    `emit` gets the engine's events, `progress` what is being done, in words. Raises Refusal.
    """
    check(settings)
    progress("looking for the model")
    checkpoint = Checkpoint(resolve(model))
    device = chosen(device)
    text = TextSide(checkpoint)
    progress(f"reading the weights of {checkpoint.name}")
    from . import families

    if device == "cpu":
        spare_a_core()
    family = families.load(checkpoint, device, settings.context)
    budget, note = cache_budget(settings.prompt_cache_gib)
    store = Store(budget, family.grain, note)
    if settings.disk:
        progress("looking at the states on disk")
        store.disk = open_disk(checkpoint, device, family.grain, settings)
    progress("ready")
    engine = Engine(family, store, emit, lambda id: text.decode([id]), room_for_runs(device, budget))
    return Opened(checkpoint, family, device, engine, text)


def open_disk(checkpoint: Checkpoint, device: str, grain: int, settings: Settings):
    """The states on disk of this model, build and device. Raises Refusal when their directory is not private."""
    from .cache import directory, namespace
    from .cache.disk import GIB, Disk, Limits
    from .resident.log import log

    limits = Limits(
        learned=int(settings.learn_gib * GIB) if settings.learn_conversations else None,
        spilled=int(settings.spill_gib * GIB) if settings.spill_gib else None,
        free=int(settings.learn_min_free_gib * GIB),
        daily=int(settings.learn_daily_gib * GIB),
    )
    base = Path(settings.learn_dir) if settings.learn_dir else directory.default()
    return Disk(base, namespace.facts(checkpoint, device), grain, limits, log)


def cache_budget(gib: float) -> tuple[int, str]:
    """Bytes for kept states, at most half of the memory that is available, and a word where that is less than asked."""
    asked, half = int(gib * 2**30), psutil.virtual_memory().available // 2
    note = f"{gib:g} GiB were asked for; half of the available memory is {half / 2**30:.1f} GiB"
    return (asked, "") if asked <= half else (half, note)


def room_for_runs(device: str, budget: int) -> int:
    """Bytes of the device that running sequences may take together; a tenth of what is free is left to the passes."""
    import torch

    free = psutil.virtual_memory().available - budget if device == "cpu" else torch.cuda.mem_get_info(device)[0]
    return int(0.9 * free)


def spare_a_core() -> None:
    """Leave one core to the notebook and the socket loop: one thread that waits for its core stalls every product.

    No number depends on it. OMP_NUM_THREADS wins.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))


def check(settings: Settings) -> None:
    for name in ("spill_gib", "learn_gib", "learn_min_free_gib", "learn_daily_gib"):
        if not 0 <= (value := getattr(settings, name)) <= 1 << 20:
            raise Refusal(f"{name} is {value}.", f"Give --{name.replace('_', '-')} 0 or more.")
    if not 0 <= settings.prompt_cache_gib <= 1 << 20:
        raise Refusal(f"The prompt cache was given {settings.prompt_cache_gib} GiB.", "Give it 0 or more.")
    if settings.context is not None and settings.context < 2:
        raise Refusal(f"A context of {settings.context} tokens was asked for.", "Ask for 2 or more.")


def chosen(device: str) -> str:
    """The device of that name: "auto" is what there is, "cuda" the first GPU. Raises Refusal where there is none."""
    import torch

    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device == "auto":
        return "cuda:0" if found else "cpu"
    if device == "cpu":
        return device
    number = re.fullmatch(r"cuda(?::(\d+))?", device)
    if not number:
        raise Refusal(f"There is no device {device!r}.", "Use auto, cpu or cuda:N.")
    if int(number[1] or 0) >= found:
        raise Refusal(f"{device} was asked for and torch sees {found} GPUs.", "Use another number, or cpu.")
    return f"cuda:{int(number[1] or 0)}"
