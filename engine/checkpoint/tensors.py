"""The weights of a folder: safetensors, one file or shards, mapped and read as they are asked for."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tfmagic.errors import Refusal

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "Download the model again."
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "BOOL": 1}
"""Bytes an element of the plain dtypes; any other means a quantised checkpoint."""
QUANTISED = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".scales", ".qweight", ".qzeros", ".absmax")

TEXT = "model.language_model."
PREFIXES = (
    (TEXT, TEXT), ("language_model.model.", TEXT), ("language_model.lm_head.", "lm_head."),
    ("model.visual.", "model.visual."), ("visual.", "model.visual."),
    *((p, p) for p in ("model.vision_tower.", "model.embed_vision.", "model.vision_embedder.")),
    *((p, p) for p in ("model.audio_tower.", "model.embed_audio.")),
    ("backbone.", TEXT), ("model.", TEXT),
)  # fmt: skip
"""Stored prefix → ours; the first that fits wins. Other names (`lm_head.`, `mtp.`) stay."""

BUFFERS = ("*.rotary_emb.inv_freq",)
"""Never weights: computed from the config."""


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    """As the file spells it."""
    dtype: str
    shape: tuple[int, ...]


class Tensors(Mapping[str, "torch.Tensor"]):
    """Normalised name → CPU tensor in its stored dtype, mapped from the file on access (not copied).

    `take` and `[]` note what was read, so that a family can check at the end that nothing was left over.
    Making one reads the files' headers alone. Raises Refusal for a folder whose weights are not all there.
    """

    def __init__(self, folder: Path):
        self._stored = stored(folder)
        self._open: dict[Path, object] = {}
        self._read: set[str] = set()

    def fresh(self) -> Tensors:
        """The same tensors with nothing noted as read."""
        other = object.__new__(Tensors)
        other._stored, other._open, other._read = self._stored, self._open, set()
        return other

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)

    def __contains__(self, name: object) -> bool:
        return name in self._stored

    def shape(self, name: str) -> tuple[int, ...]:
        return self._stored[name].shape

    def __getitem__(self, name: str) -> torch.Tensor:
        file, stored_name, _, _ = self._stored[name]
        if file not in self._open:
            from safetensors import SafetensorError, safe_open

            try:
                self._open[file] = safe_open(file, framework="pt").__enter__()
            except (SafetensorError, OSError) as error:
                raise Refusal(f"{file} cannot be read: {error}.", AGAIN) from None
        self._read.add(name)
        return self._open[file].get_tensor(stored_name)

    def take(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, which must be there and of this shape. Raises Refusal otherwise."""
        if name not in self._stored:
            raise Refusal(f"The checkpoint lacks the tensor {name}.", "Its config.json and its weights do not fit.")
        if shape is not None and self.shape(name) != tuple(shape):
            problem = f"{name} has the shape {list(self.shape(name))}, and config.json asks for {list(shape)}."
            raise Refusal(problem, "Its config.json and its weights do not fit.")
        return self[name]

    def leftover(self, drop: Sequence[str] = ()) -> list[str]:
        """The names that were never read and match none of the `drop` patterns (`*` as in file names), sorted."""
        patterns = (*BUFFERS, *drop)
        return sorted(n for n in self._stored if n not in self._read and not any(fnmatchcase(n, p) for p in patterns))


def normalised(name: str) -> str:
    for prefix, ours in PREFIXES:
        if name.startswith(prefix):
            return ours + name[len(prefix) :]
    return name


def stored(folder: Path) -> dict[str, Stored]:
    """Every tensor of the folder by normalised name. Raises Refusal naming what is missing, cut short or quantised."""
    index = weight_map(folder)
    files = sorted(set(index.values())) if index else [SINGLE]
    missing = [file for file in files if not (folder / file).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise Refusal(f"{folder} lacks {len(missing)} of its {len(files)} weight files: {shown}.", AGAIN)
    found: dict[str, Stored] = {}
    for file in files:
        for tensor in header(folder / file):
            name = normalised(tensor.name)
            if name in found:
                problem = f"{folder} holds the tensor {name} twice, in {found[name].file.name} and {file}."
                raise Refusal(problem, AGAIN)
            found[name] = tensor
    for name, file in index.items():
        if found.get(normalised(name), (None,))[0] != folder / file:
            raise Refusal(f"{INDEX} promises {name} in {file}, which lacks it.", AGAIN)
    return found


def weight_map(folder: Path) -> dict[str, str]:
    """Tensor name → file name of the index; empty when the folder has no index."""
    path = folder / INDEX
    if not path.is_file():
        if not (folder / SINGLE).is_file():
            raise no_weights(folder)
        return {}
    try:
        index = json.loads(path.read_bytes())["weight_map"]
    except (ValueError, RecursionError, KeyError, TypeError):
        raise Refusal(f"{path} is not an index of weights.", AGAIN) from None
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}.", "Check the file's permissions.") from None
    if not isinstance(index, dict) or not index:
        raise Refusal(f"{path} lists no weights.", AGAIN)
    for file in index.values():
        if not isinstance(file, str) or "/" in file or "\\" in file or not file.endswith(".safetensors"):
            raise Refusal(f"{path} names {file!r}, which is no safetensors file of this folder.", AGAIN)
    return index


def no_weights(folder: Path) -> Refusal:
    if any(folder.glob("*.gguf")):
        return Refusal(f"{folder} holds GGUF weights; GGUF is not read yet.", "Use the safetensors checkpoint.")
    if any(folder.glob("*.bin")) or any(folder.glob("*.pt*")):
        fix = "Save the model with safe_serialization=True in a place that you trust."
        return Refusal(f"{folder} holds pickled weights only, which are never loaded.", fix)
    if any(folder.glob("*.safetensors")):
        return Refusal(f"{folder} holds shards but no {INDEX}.", AGAIN)
    return Refusal(f"{folder} holds no {SINGLE} and no {INDEX}.", AGAIN)


def header(path: Path) -> list[Stored]:
    """The tensors of one safetensors file, read from its header; the file's length is checked against it.

    Layout: u64 little-endian header length, JSON {name: {dtype, shape, data_offsets}}, data.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            start = file.read(8)
            if start.startswith(b"version "):
                raise Refusal(f"{path} is a Git LFS pointer, not the weights.", "Run `git lfs pull` in its folder.")
            length = int.from_bytes(start, "little")
            if len(start) < 8 or not 2 <= length <= min(MAX_HEADER, size - 8):
                raise Refusal(f"{path} is cut short or no safetensors file ({size:,} bytes).", AGAIN)
            entries = json.loads(file.read(length))
    except OSError as error:
        raise Refusal(f"{path} cannot be read: {error.strerror}.", "Check the file's permissions.") from None
    except (ValueError, RecursionError):
        raise Refusal(f"{path} has a damaged header.", AGAIN) from None
    if not isinstance(entries, dict):
        raise Refusal(f"{path} has a damaged header.", AGAIN)
    entries.pop("__metadata__", None)
    tensors = [entry(path, name, fields) for name, fields in entries.items()]
    needed = 8 + length + max((end for _, end in tensors), default=0)
    if needed != size:
        raise Refusal(f"{path} has {size:,} bytes and its header promises {needed:,}.", AGAIN)
    return [tensor for tensor, _ in tensors]


def entry(path: Path, name: str, fields: object) -> tuple[Stored, int]:
    """One header entry, checked, and the offset at which its data ends."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sound = all(type(n) is int and n >= 0 for n in (*shape, begin, end)) and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise Refusal(f"{path} has a damaged header entry for {name[:80]!r}.", AGAIN)
    if dtype not in SIZES or name.endswith(QUANTISED):
        problem = f"{name} in {path.name} is quantised ({dtype}), which is not read yet."
        raise Refusal(problem, "Use the bf16 checkpoint.")
    if end - begin != SIZES[dtype] * math.prod(shape):
        raise Refusal(f"{path} has a damaged header entry for {name[:80]!r}.", AGAIN)
    return Stored(path, name, dtype, shape), end
