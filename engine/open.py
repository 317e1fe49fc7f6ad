"""Opening a model: from a name to an engine that takes requests."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tfmagic import protocol
from tfmagic.errors import Refusal

from . import sampling
from .cache.store import Store
from .checkpoint import Checkpoint, resolve
from .loop import Engine
from .prompt import Limits, Prompt, TextSide, build


@dataclass
class Settings:
    prompt_cache_gib: float = 1.0
    """Memory for kept states; 0: none are kept."""
    context: int | None = None
    """The longest prompt and reply together, tokens; None: the checkpoint's own."""


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
    progress("ready")
    store = Store(int(settings.prompt_cache_gib * 2**30), family.grain)
    return Opened(checkpoint, family, device, Engine(family, store, emit, lambda id: text.decode([id])), text)


def spare_a_core() -> None:
    """Leave one core to the notebook and the socket loop: one thread that waits for its core stalls every product.

    No number depends on it. OMP_NUM_THREADS wins.
    """
    import torch

    if "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) - 1))


def check(settings: Settings) -> None:
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
