"""The weights of a folder: safetensors, one file or shards, read to a device as they are asked for and ahead of it."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from tfmagic.errors import Refusal

from .affine import Affine, Form, Scheme
from .names import BUFFERS, TEXT, normalised, place

if TYPE_CHECKING:
    import torch

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
AGAIN = "Download the model again."
MISFIT = "Its config.json and its weights do not fit."
MAX_HEADER = 100_000_000
"""Bytes; the format's own limit."""

SIZES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "U32": 4, "BOOL": 1}
"""Bytes an element of what is read; any other dtype means a quantised checkpoint. U32 is MLX's packing alone."""
QUANTISED = (".weight_scale", ".weight_scale_inv", ".weight_packed", ".qweight", ".qzeros", ".absmax")
SCALES = ("BF16", "F16", "F32")
AHEAD = {"cpu": 256 << 20}
"""Bytes that are read before they are asked for, by kind of device."""
AHEAD_ELSEWHERE = 2 << 30

WITH_ONE = tuple(
    f"{TEXT}{name}.weight"
    for name in ("norm", "layers.*.input_layernorm", "layers.*.post_attention_layernorm",
                 "layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm")
)  # fmt: skip
"""Norms of Qwen3.5 whose weight is stored as its distance from 1, and by MLX's converters as it is."""


class Stored(NamedTuple):
    """Where a tensor lies."""

    file: Path
    name: str
    """As the file spells it."""
    dtype: str
    shape: tuple[int, ...]
    offset: int
    """Of its first byte in the file."""

    @property
    def bytes(self) -> int:
        return SIZES[self.dtype] * math.prod(self.shape)


class Tensors(Mapping[str, "torch.Tensor"]):
    """Normalised name → tensor on the device in its stored dtype; a packed matrix as float32.

    `take` and `[]` note what was read, so that a family can check at the end that nothing was left over. From the first
    `take` on, what a family asks for next is read ahead of it, in threads. Making one reads the files' headers alone.
    Raises Refusal for a folder whose weights are not all there or are packed in a way that is not read.
    """

    def __init__(self, folder: Path, scheme: Scheme | None = None):
        self._stored = stored(folder)
        self._packed = packed(self._stored, scheme or Scheme({}, folder.name))
        # Their converters fold 1 into norms, and move a convolution's channels last, together.
        self.mlx = any(n.endswith(".conv1d.weight") and s.shape[2:] == (1,) for n, s in self._stored.items())
        self._begin("cpu", None)

    def _begin(self, device: torch.device | str, on_read: Callable[[int, int], None] | None) -> None:
        self.device, self._on_read = device, on_read
        self._pump, self._read, self._ahead = None, set(), {}
        self._parts = {f"{stem}.{part}" for stem in self._packed for part in ("scales", "biases")}
        ordered = sorted((p, n) for n in self._stored if (p := place(n)) is not None)
        self._queue = [name for _, name in reversed(ordered)]
        self._total = sum(self._stored[name].bytes for name in self._queue)

    def fresh(
        self, device: torch.device | str = "cpu", on_read: Callable[[int, int], None] | None = None
    ) -> Tensors:
        """The same tensors, for this device, with nothing noted as read.

        `on_read(done, total)` is told, by the thread that takes, the bytes read so far and those of the whole model.
        """
        other = object.__new__(Tensors)
        other._stored, other._packed, other.mlx = self._stored, self._packed, self.mlx
        other._begin(device, on_read)
        return other

    def __iter__(self) -> Iterator[str]:
        return (name for name in self._stored if name not in self._parts)

    def __len__(self) -> int:
        return len(self._stored) - len(self._parts)

    def __contains__(self, name: object) -> bool:
        return name in self._stored and name not in self._parts

    def shape(self, name: str) -> tuple[int, ...]:
        """Of the values: a packed matrix's is [N, K]."""
        shape, form = self._stored[name].shape, self.form(name)
        return shape if form is None else (shape[0], shape[1] * 32 // form.bits)

    def form(self, name: str) -> Form | None:
        """How a matrix is packed; None: it is not."""
        return self._packed.get(name.removesuffix(".weight")) if name.endswith(".weight") else None

    def __getitem__(self, name: str) -> torch.Tensor:
        if name not in self:
            raise KeyError(name)
        if self.form(name) is not None:
            return self._affine(name).dequantised()
        tensor = self._get(name)
        if self.mlx and any(fnmatchcase(name, pattern) for pattern in WITH_ONE):
            return tensor.float() - 1.0
        return tensor

    def take(self, name: str, shape: Sequence[int] | None = None) -> torch.Tensor:
        """The tensor, which must be there and of this shape; MLX's order of a convolution's dimensions, channels last,
        is put right. Raises Refusal otherwise."""
        self._check(name, shape)
        self._fill()
        tensor = self[name]
        self._tell()
        return tensor if shape is None or tensor.shape == tuple(shape) else tensor.movedim(-1, 1).contiguous()

    def affine(self, name: str, shape: Sequence[int]) -> Affine | None:
        """The packed matrix in its pieces; None where the checkpoint holds it in plain numbers. Raises Refusal as
        `take` does."""
        self._check(name, shape)
        if self.form(name) is None:
            return None
        self._fill()
        pieces = self._affine(name)
        self._tell()
        return pieces

    def leftover(self, drop: Sequence[str] = ()) -> list[str]:
        """The names that were never read and match none of the `drop` patterns (`*` as in file names), sorted."""
        patterns = (*BUFFERS, *drop)
        return sorted(n for n in self if n not in self._read and not any(fnmatchcase(n, p) for p in patterns))

    def _check(self, name: str, shape: Sequence[int] | None) -> None:
        if name not in self:
            raise Refusal(f"The checkpoint lacks the tensor {name}.", MISFIT)
        found = self.shape(name)
        if shape is None or found == tuple(shape) or (len(shape) > 2 and found == (shape[0], *shape[2:], shape[1])):
            return
        raise Refusal(f"{name} has the shape {list(found)}, and config.json asks for {list(shape)}.", MISFIT)

    def _affine(self, name: str) -> Affine:
        stem = name.removesuffix(".weight")
        q, scales, biases = (self._get(f"{stem}.{part}") for part in ("weight", "scales", "biases"))
        return Affine(q, scales, biases, *self._packed[stem])

    def _tell(self) -> None:
        if self._on_read is not None:
            self._on_read(min(self._pump.bytes, self._total), self._total)

    def _get(self, name: str) -> torch.Tensor:
        self._read.add(name)
        return (self._ahead.pop(name, None) or self._start(name)).result()

    def _start(self, name: str):
        if self._pump is None:
            from .pump import Pump

            self._pump = Pump(self.device)
        s = self._stored[name]
        return self._pump.start(s.file, s.offset, s.dtype, s.shape)

    def _fill(self) -> None:
        """Begin to read what will be asked for next, as far as `AHEAD` goes."""
        room = AHEAD.get(str(self.device), AHEAD_ELSEWHERE) - sum(self._stored[name].bytes for name in self._ahead)
        while self._queue and room > 0:
            name = self._queue.pop()
            if name not in self._read:
                self._ahead[name] = self._start(name)
                room -= self._stored[name].bytes


def packed(found: Mapping[str, Stored], scheme: Scheme) -> dict[str, Form]:
    """The packed modules by normalised name. Raises Refusal where packed tensors and config.json do not agree."""
    modules: dict[str, Form] = {}
    for name, tensor in found.items():
        module, _, part = name.rpartition(".")
        if part in ("scales", "biases") or tensor.dtype == "U32":
            modules[module] = scheme.of(module)
            if modules[module] is None:
                problem = f"{name[:80]} in {tensor.file.name} is quantised ({tensor.dtype})"
                raise Refusal(f"{problem}, and config.json does not say how.", MISFIT)
    for module, form in modules.items():
        check_packed(module, form, *(found.get(f"{module}.{part}") for part in ("weight", "scales", "biases")))
    for module, form in scheme.modules.items():
        if form is not None and f"{module}.weight" in found and module not in modules:
            raise Refusal(f"config.json says that {module} is packed, and its weights are not.", MISFIT)
    return modules


def check_packed(module: str, form: Form, q: Stored | None, scales: Stored | None, biases: Stored | None) -> None:
    if q is None or scales is None or biases is None:
        parts = zip(("weight", "scales", "biases"), (q, scales, biases))
        raise Refusal(f"{module} is quantised and lacks its {next(n for n, p in parts if p is None)}.", AGAIN)
    if q.dtype != "U32" or scales.dtype not in SCALES or biases.dtype != scales.dtype:
        problem = f"{module} is packed in {q.dtype} with scales in {scales.dtype} and biases in {biases.dtype}."
        raise Refusal(problem, "MLX packs in U32, with both in one of " + ", ".join(SCALES) + ".")
    shapes = [list(part.shape) for part in (q, scales, biases)]
    sound = len(q.shape) == 2 and q.shape[1] * 32 % (form.bits * form.group) == 0
    if not sound or not scales.shape == biases.shape == (q.shape[0], q.shape[1] * 32 // (form.bits * form.group)):
        packing = f"{form.bits} bits in groups of {form.group}"
        raise Refusal(f"{module} has the shapes {shapes}, which are not {packing}.", MISFIT)


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

    Layout: u64 little-endian header length, JSON {name: {dtype, shape, data_offsets}}, data without holes.
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
    tensors = [entry(path, name, fields, 8 + length) for name, fields in entries.items()]
    end = 8 + length
    for tensor in sorted(tensors, key=lambda tensor: (tensor.offset, tensor.bytes)):
        if tensor.offset != end:
            how = "overlaps another" if tensor.offset < end else "leaves a hole before it"
            raise Refusal(f"{path} is damaged: the tensor {tensor.name[:80]!r} {how}.", AGAIN)
        end += tensor.bytes
    if end != size:
        raise Refusal(f"{path} has {size:,} bytes and its header promises {end:,}.", AGAIN)
    return tensors


def entry(path: Path, name: str, fields: object, base: int) -> Stored:
    """One header entry, checked; the file's data begin at `base`."""
    try:
        dtype, shape, (begin, end) = fields["dtype"], tuple(fields["shape"]), fields["data_offsets"]
        sound = all(type(n) is int and 0 <= n < 1 << 48 for n in (*shape, begin, end)) and isinstance(dtype, str)
    except (KeyError, TypeError, ValueError):
        sound = False
    if not sound:
        raise Refusal(f"{path} has a damaged header entry for {name[:80]!r}.", AGAIN)
    if dtype not in SIZES or name.endswith(QUANTISED):
        problem = f"{name[:80]} in {path.name} is quantised ({dtype[:20]}), which is not read yet."
        raise Refusal(problem, "Use the bf16 checkpoint.")
    tensor = Stored(path, name, dtype, shape, base + begin)
    if end - begin != tensor.bytes:
        raise Refusal(f"{path} has a damaged header entry for {name[:80]!r}.", AGAIN)
    return tensor
