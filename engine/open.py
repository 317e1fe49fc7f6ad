"""Opening a model: from a name to an engine that takes requests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import psutil

from tfmagic import protocol
from tfmagic.errors import Refusal

from . import sampling
from .cache.holdings import shelves
from .cache.store import Store
from .checkpoint import Checkpoint, resolve
from .drafting.budget import Curve
from .loop import Engine
from .prompt import Limits, Prompt, TextSide, build
from .ranges import span
from .settling import beginning

PROBES = "a", "\n\nb"
"""Next turns that begin differently: what their prompts share, every next turn's prompt begins with."""


@dataclass
class Settings:
    prompt_cache_gib: float = 1.0
    """Memory for kept states, beside a GPU taken at the start; 0: none are kept."""
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
    form: str | None = None
    """The numeric form, of `families.FORMS`; None: bf16 on a GPU that it is made for, else exact."""
    kv_cache: str = "bf16"
    """What keys and values are held in: "bf16", or "fp8", which takes half the room and changes replies a little."""
    drafter: str | None = None
    """The block drafter, as `checkpoint.resolve` takes it; None: the folder `drafter` in the model's own, if there is
    one; "none": none."""
    drafter_bits: int = 16
    """4: the drafter's matrices are rounded to 4 bits as they are read; 16: they are not."""

    @property
    def disk(self) -> bool:
        return self.learn_conversations or self.spill_gib > 0


class Opened:
    """A model that is ready. `prepare` and `sampling` may be called from any thread."""

    def __init__(self, checkpoint: Checkpoint, model, device: str, engine: Engine, text: TextSide, drafter=None):
        self.name, self.device, self.context = checkpoint.name, device, model.context
        self.text, self.engine = text, engine
        self.drafter = drafter.name if drafter else "none"
        """In words."""
        self._model, self._generation, self._config = model, checkpoint.generation, checkpoint.config
        self._size = drawable(model, text)

    @span("prepare")
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
        drafter = self.drafter != "none"
        return sampling.fill(params, generation, prompt.key, self.context, self._size, drafter)


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
    checkpoint.on_read = reading(checkpoint.name, progress)
    from . import families

    if device == "cpu":
        spare_a_core()
    family = families.load(checkpoint, device, settings.context, settings.form, settings.kv_cache)
    if plan := getattr(family, "plan", None):
        progress(f"memory of {device}: {plan}")
    drafter = read_drafter(checkpoint, family, drawable(family, text), device, settings, progress)
    if held := getattr(drafter, "plan", None):
        family.plan = f"{plan}, {held}"
    budget, note = cache_budget(settings.prompt_cache_gib)
    store = Store(budget, family.grain, note)
    if settings.disk:
        progress("looking at the states on disk")
        store.disk = open_disk(checkpoint, device, family, settings)
    planned = getattr(family, "memory", None)
    memory = room_for_runs(device, budget) if planned is None else planned
    if drafter is not None:
        family.tap(drafter.layers)  # what is captured for the timing is then what runs
    if hasattr(family, "warm_up"):
        progress("compiling kernels")
        family.warm_up(drawable(family, text))
    progress("timing rounds")
    windows = getattr(family, "windows", ())
    curve = Curve.timed(family.time_round, windows) if hasattr(family, "time_round") else None
    if (budget or store.disk is not None) and hasattr(family, "pin"):
        family.pin(budget)
    progress("ready")
    engine = Engine(family, store, emit, pieces(text), memory, drafter, curve)
    return Opened(checkpoint, family, device, engine, text, drafter)


def reading(name: str, progress: Callable[[str], None]) -> Callable[[int, int], None]:
    """Says how far the reading of weights has come, in words, and only when the words change."""
    said = f"reading the weights of {name}"
    progress(said)

    def tell(done: int, total: int) -> None:
        nonlocal said
        unit, digits = (1e9, 1) if total >= 1e9 else (1e6, 0)
        text = f"reading the weights of {name}: {done / unit:.{digits}f} of {total / unit:.{digits}f} "
        text += "GB" if digits else "MB"
        if text != said:
            said = text
            progress(text)

    return tell


def pieces(text: TextSide) -> Callable[[int], str]:
    """One token's text. The likeliest tokens of many streams are hundreds a round, and mostly the same."""
    return lru_cache(1 << 16)(lambda id: text.decode([id]))


def drawable(model, text: TextSide) -> int:
    """Ids that a reply may hold: 0, 1, ..."""
    return min(model.vocab, text.tokenizer.get_vocab_size(with_added_tokens=True))


def read_drafter(
    checkpoint: Checkpoint, model, size: int, device: str, settings: Settings, progress: Callable[[str], None]
):
    """The block drafter that was asked for, or that lies in the model's folder; None: none. `size`: ids that a reply
    may hold. Raises Refusal."""
    own = checkpoint.path / "drafter"
    if settings.drafter == "none" or (settings.drafter is None and not own.is_dir()):
        return None
    import torch

    from .families import chosen_form

    if device == "cpu" or chosen_form(settings.form, device) == "exact":
        from .drafting.block import Drafter
    else:
        from .drafting.static import StaticDrafter as Drafter

    progress("reading the drafter")
    where = settings.drafter or str(own)
    try:
        return Drafter(Checkpoint(resolve(where)), model, device, size, settings.drafter_bits)
    except Refusal as refusal:
        raise Refusal(f"The drafter {where[:200]}: {refusal.problem}", refusal.fix) from None
    except torch.OutOfMemoryError:
        fix = "Use --drafter-bits 4, --drafter none, or a shorter --context."
        raise Refusal(f"The drafter {where[:200]} does not fit on {device} beside the model.", fix) from None


def open_disk(checkpoint: Checkpoint, device: str, family, settings: Settings):
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
    return Disk(base, namespace.facts(checkpoint, device, kv=getattr(family, "kv", "own")), family.grain, limits, log)


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
    if settings.drafter_bits not in (4, 16):
        raise Refusal(f"A drafter of {settings.drafter_bits} bits was asked for.", "Ask for 4 or 16.")
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
