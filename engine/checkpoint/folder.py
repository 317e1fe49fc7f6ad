"""One model folder: its configuration, tokenizer, template and weights, checked before any of it is used."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tfmagic.errors import Refusal

from .affine import Scheme
from .names import VISUAL
from .resolve import not_a_folder
from .tensors import Tensors

if TYPE_CHECKING:
    import torch

Family = TypeVar("Family")

MAX_JSON = 64 * 1024 * 1024
"""Bytes of a JSON or template file; the largest real tokenizers take about 33 MB."""


class Checkpoint:
    """A model folder in the Hugging Face layout.

    Making one reads config.json and the weights' headers, no weights: a folder that cannot work is refused here, by
    name. Raises Refusal.
    """

    on_read: Callable[[int, int], None] | None = None
    """Told (bytes read, bytes of the model) while weights are read."""

    def __init__(self, path: str | Path):
        self.path = Path(path)
        if not self.path.is_dir():
            if self.path.is_file():
                raise not_a_folder(self.path)
            raise Refusal(f"There is no model folder {self.path}.", "Check the spelling.")
        self.config: dict[str, Any] = self._json("config.json")
        if not self.config:
            raise self._no_config()
        self._check_config()
        self._tensors = Tensors(self.path, Scheme(self.config, self.name))
        if self._tensors.mlx and not any(name.startswith(VISUAL) for name in self._tensors):
            self.config.pop("vision_config", None)  # mlx-lm leaves a tower out and its configuration in

    @property
    def name(self) -> str:
        """What to call the model: the folder's name, or the id of a hub snapshot, or `embedded`."""
        path = self.path.absolute()
        if path.parts[-2:] == ("embedded", "model"):
            return "embedded"
        if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
            return path.parent.parent.name.removeprefix("models--").replace("--", "/", 1)
        return path.name

    @property
    def model_type(self) -> str:
        return self.config["model_type"]

    def choose(self, families: Mapping[str, Family]) -> Family:
        """The entry of `families` for this model type. Raises Refusal naming the type and the known ones."""
        if self.model_type not in families:
            known = ", ".join(sorted(families))
            raise Refusal(f"{self.name} is a {self.model_type!r} model, which is not known.", f"Known are: {known}.")
        return families[self.model_type]

    @property
    def tied(self) -> bool:
        """True: the head is the embedding matrix. The top level wins over text_config."""
        text = self.config.get("text_config", {})
        return bool(self.config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)))

    @cached_property
    def generation(self) -> dict[str, Any]:
        """generation_config.json; empty when absent."""
        return self._json("generation_config.json")

    @cached_property
    def preprocessor(self) -> dict[str, Any]:
        """The image processor's options as the checkpoint spells them; empty when absent."""
        own = self._json("preprocessor_config.json")
        return own or self._json("processor_config.json").get("image_processor") or {}

    @cached_property
    def tokenizer_config(self) -> dict[str, Any]:
        return self._json("tokenizer_config.json")

    @cached_property
    def template(self) -> str:
        """The chat template's Jinja source. Raises Refusal when there is none."""
        source = self._read("chat_template.jinja")
        if source is None:
            named = self._json("chat_template.json").get("chat_template", self.tokenizer_config.get("chat_template"))
            if isinstance(named, list):
                named = {entry.get("name"): entry.get("template") for entry in named if isinstance(entry, dict)}
                named = named.get("default")
            source = named
        if not isinstance(source, str):
            fix = "Use the chat version of the model, or put a chat_template.jinja into the folder."
            raise Refusal(f"{self.name} has no chat template.", fix)
        return source

    @property
    def tokenizer_path(self) -> Path:
        """Raises Refusal when there is no tokenizer.json."""
        path = self.path / "tokenizer.json"
        if not path.is_file():
            fix = "Save it from transformers: AutoTokenizer.from_pretrained(...).save_pretrained(folder)."
            raise Refusal(f"{self.name} has no tokenizer.json.", fix)
        return path

    def tensors(self, device: torch.device | str = "cpu") -> Tensors:
        """The weights by normalised name, to be read to the device; a fresh tally of what was read."""
        return self._tensors.fresh(device, self.on_read)

    def _json(self, name: str) -> dict[str, Any]:
        text = self._read(name)
        if text is None:
            return {}
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise Refusal(f"{self.path / name} is not JSON: {str(error)[:120]}.", "Download the model again.") from None
        if not isinstance(value, dict):
            raise Refusal(f"{self.path / name} holds no JSON object.", "Download the model again.")
        return value

    def _read(self, name: str) -> str | None:
        path = self.path / name
        if not path.is_file():
            return None
        try:
            if path.stat().st_size > MAX_JSON:
                raise Refusal(f"{path} is over {MAX_JSON >> 20} MiB.", "Check that it is the file it should be.")
            return path.read_text("utf-8")
        except UnicodeDecodeError:
            raise Refusal(f"{path} is not UTF-8 text.", "Download the model again.") from None
        except OSError as error:
            raise Refusal(f"{path} cannot be read: {error.strerror}.", "Check the file's permissions.") from None

    def _no_config(self) -> Refusal:
        if any(self.path.glob("*.gguf")):
            return Refusal(f"{self.path} holds GGUF files; GGUF is not read yet.", "Use the safetensors checkpoint.")
        return Refusal(f"{self.path} has no config.json.", "Name a folder in the Hugging Face layout.")

    def _check_config(self) -> None:
        path = self.path / "config.json"
        if not isinstance(self.config.get("model_type"), str):
            raise Refusal(f"{path} names no model_type.", "Download the model again.")
        if not isinstance(self.config.get("text_config", {}), dict):
            raise Refusal(f"{path} has a text_config that is no object.", "Download the model again.")
