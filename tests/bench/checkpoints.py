"""Checkpoints of real sizes with random weights, so that the real reader, names and shapes are what is measured.

    python -m tests.bench.checkpoints 4b|9b|27b|tiny DIR [--bits 4|8] [--group 32|64|128] [--device cuda:0]
    python -m tests.bench.checkpoints read DIR [--device cuda:0]

The first writes bf16 weights in Hugging Face's layout, or packed ones in MLX's; the second reads a checkpoint to the
device and prints GB/s. A tensor's numbers depend on its name and the kind of device alone; `Drawn` has the same ones
without a file, for what is measured behind the reading.

What keeps the numbers finite and the text alive: every matrix has the variance 1 / inputs, so that rows of unit length
stay so; what is added to the residual is scaled by 1 / sqrt(2 · layers); the embeddings are small beside what the
layers add (0.02), so that a tied head does not find the last token in its own row again; the gates' decay is spread as
in training (A_log = log U(1, 16), a step size of 0.001 to 0.1).
"""

from __future__ import annotations

import argparse
import json
import math
import struct
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from tfmagic.engine.checkpoint import Checkpoint, resolve
from tfmagic.engine.checkpoint.affine import Affine, Form
from tfmagic.engine.checkpoint.names import TEXT, VISUAL, normalised

SHARD = 2 << 30
"""Bytes of a file, about; each is written by a thread of its own."""
THREADS = 8
EMBEDDING = 0.02
NAMES = {torch.bfloat16: "BF16", torch.uint32: "U32", torch.float32: "F32", torch.float16: "F16"}


@dataclass(frozen=True)
class Size:
    """A dense Qwen3.5's numbers; the defaults are common to all released sizes."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    kv_heads: int
    key_heads: int
    value_heads: int
    tied: bool
    depth: int
    width: int
    vision_heads: int
    vision_intermediate: int
    head_dim: int = 256
    dim: int = 128
    """Of a Gated DeltaNet's head."""
    vocab: int = 248_320
    section: tuple[int, int, int] = (11, 11, 10)
    table: int = 2304
    positions: int = 262_144

    @property
    def channels(self) -> int:
        return (2 * self.key_heads + self.value_heads) * self.dim


SIZES = {
    "4b": Size(2560, 9216, 32, 16, 4, 16, 32, True, 24, 1024, 16, 4096),
    "9b": Size(4096, 12288, 32, 16, 4, 16, 32, False, 27, 1152, 16, 4304),
    "27b": Size(5120, 17408, 64, 24, 4, 16, 48, False, 27, 1152, 16, 4304),
    "tiny": Size(
        *(128, 256, 4, 2, 1, 2, 4, True, 2, 64, 2, 128),
        head_dim=64, dim=32, vocab=5000, section=(3, 3, 2), table=64, positions=4096,
    ),
}  # fmt: skip


class Planned(NamedTuple):
    """A tensor to be written."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[torch.Generator], Tensor]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def normal(name: str, *shape: int, std: float, mean: float = 0.0) -> Planned:
    def make(g: torch.Generator) -> Tensor:
        return torch.randn(shape, dtype=torch.bfloat16, device=g.device, generator=g).mul_(std).add_(mean)

    return Planned(name, shape, torch.bfloat16, make)


def spread(name: str, n: int, of: Callable[[Tensor], Tensor]) -> Planned:
    """`of` numbers uniform in [0, 1)."""
    return Planned(name, (n,), torch.bfloat16, lambda g: of(torch.rand(n, device=g.device, generator=g)).bfloat16())


def planned(s: Size) -> Iterator[Planned]:
    """Every tensor of a checkpoint, by Hugging Face's names."""
    yield normal(TEXT + "embed_tokens.weight", s.vocab, s.hidden, std=EMBEDDING)
    for i in range(s.layers):
        yield from layer(s, f"{TEXT}layers.{i}.", full=(i + 1) % 4 == 0)
    yield normal(TEXT + "norm.weight", s.hidden, std=0.02)
    if not s.tied:
        yield normal("lm_head.weight", s.vocab, s.hidden, std=EMBEDDING)
    yield from tower(s)


def layer(s: Size, prefix: str, full: bool) -> Iterator[Planned]:
    def matrix(name: str, rows: int, columns: int, by: float = 1.0) -> Planned:
        return normal(f"{prefix}{name}.weight", rows, columns, std=by / math.sqrt(columns))

    back = 1 / math.sqrt(2 * s.layers)
    yield normal(prefix + "input_layernorm.weight", s.hidden, std=0.02)
    yield normal(prefix + "post_attention_layernorm.weight", s.hidden, std=0.02)
    if full:
        for name in ("q_norm", "k_norm"):
            yield normal(f"{prefix}self_attn.{name}.weight", s.head_dim, std=0.02)
        rows = {"q": 2 * s.heads * s.head_dim, "k": s.kv_heads * s.head_dim, "v": s.kv_heads * s.head_dim}
        yield from (matrix(f"self_attn.{name}_proj", n, s.hidden) for name, n in rows.items())
        yield matrix("self_attn.o_proj", s.hidden, s.heads * s.head_dim, by=back)
    else:
        values = s.value_heads * s.dim
        rows = {"qkv": s.channels, "z": values, "b": s.value_heads, "a": s.value_heads}
        yield from (matrix(f"linear_attn.in_proj_{name}", n, s.hidden) for name, n in rows.items())
        yield matrix("linear_attn.out_proj", s.hidden, values, by=back)
        yield normal(prefix + "linear_attn.conv1d.weight", s.channels, 1, 4, std=0.5)
        yield normal(prefix + "linear_attn.norm.weight", s.dim, std=0.02, mean=1.0)
        yield spread(prefix + "linear_attn.A_log", s.value_heads, lambda u: torch.log(1 + 15 * u))
        yield spread(prefix + "linear_attn.dt_bias", s.value_heads, step_bias)
    yield matrix("mlp.gate_proj", s.intermediate, s.hidden)
    yield matrix("mlp.up_proj", s.intermediate, s.hidden)
    yield matrix("mlp.down_proj", s.hidden, s.intermediate, by=back)


def step_bias(u: Tensor) -> Tensor:
    """What softplus takes to a step size of 0.001 to 0.1, evenly on a logarithmic scale."""
    step = torch.exp(math.log(0.001) + u * math.log(100))
    return step + torch.log(-torch.expm1(-step))


def tower(s: Size) -> Iterator[Planned]:
    def linear(name: str, rows: int, columns: int, std: float) -> Iterator[Planned]:
        yield normal(f"{VISUAL}{name}.weight", rows, columns, std=std / math.sqrt(columns))
        yield normal(f"{VISUAL}{name}.bias", rows, std=0.02 * std)

    def norm(name: str) -> Iterator[Planned]:
        yield normal(f"{VISUAL}{name}.weight", s.width, std=0.02, mean=1.0)
        yield normal(f"{VISUAL}{name}.bias", s.width, std=0.02)

    yield normal(VISUAL + "patch_embed.proj.weight", s.width, 3, 2, 16, 16, std=1 / math.sqrt(1536))
    yield normal(VISUAL + "patch_embed.proj.bias", s.width, std=0.02)
    yield normal(VISUAL + "pos_embed.weight", s.table, s.width, std=0.5)
    back = 1 / math.sqrt(2 * s.depth)
    for j in range(s.depth):
        block = f"blocks.{j}."
        yield from norm(block + "norm1")
        yield from norm(block + "norm2")
        yield from linear(block + "attn.qkv", 3 * s.width, s.width, 1.0)
        yield from linear(block + "attn.proj", s.width, s.width, back)
        yield from linear(block + "mlp.linear_fc1", s.vision_intermediate, s.width, 1.0)
        yield from linear(block + "mlp.linear_fc2", s.width, s.vision_intermediate, back)
    yield from norm("merger.norm")
    yield from linear("merger.linear_fc1", 4 * s.width, 4 * s.width, 1.0)
    yield from linear("merger.linear_fc2", s.hidden, 4 * s.width, EMBEDDING)


# MLX's layout ------------------------------------------------------------------------------------

MLX = ((TEXT, "language_model.model."), ("lm_head.", "language_model.lm_head."), (VISUAL, "vision_tower."))
NORMS = ("input_layernorm.weight", "post_attention_layernorm.weight", "q_norm.weight", "k_norm.weight")


def mlx_name(name: str) -> str:
    for ours, theirs in MLX:
        if name.startswith(ours):
            return theirs + name[len(ours) :]
    return name


def is_packed(name: str, shape: tuple[int, ...], group: int) -> bool:
    """Whether MLX packs this tensor: the text's matrices whose rows are whole groups."""
    return len(shape) == 2 and not name.startswith(VISUAL) and name.endswith(".weight") and shape[1] % group == 0


def mlx(plan: Planned, bits: int, group: int) -> Iterator[Planned]:
    """A tensor's parts as MLX stores them."""
    name, shape = mlx_name(plan.name), plan.shape
    if is_packed(plan.name, shape, group):
        stem, groups = name.removesuffix(".weight"), (shape[0], shape[1] // group)
        made: dict[str, Tensor] = {}

        def part(i: int) -> Callable[[torch.Generator], Tensor]:
            def make(g: torch.Generator) -> Tensor:
                if not made:  # the parts stand side by side in one file, which one thread writes
                    g.manual_seed(zlib.crc32(plan.name.encode()))
                    made.update(enumerate(quantised(plan.make(g), bits, group)))
                return made.pop(i)

            return make

        yield Planned(name, (shape[0], shape[1] * bits // 32), torch.uint32, part(0))
        yield Planned(stem + ".scales", groups, torch.bfloat16, part(1))
        yield Planned(stem + ".biases", groups, torch.bfloat16, part(2))
    elif len(shape) > 2:  # channels last
        moved = (shape[0], *shape[2:], shape[1])
        yield Planned(name, moved, plan.dtype, lambda g: plan.make(g).movedim(1, -1).contiguous())
    elif name.endswith(NORMS) or plan.name == TEXT + "norm.weight":
        yield Planned(name, shape, plan.dtype, lambda g: plan.make(g) + 1)
    else:
        yield plan._replace(name=name)


def quantised(w: Tensor, bits: int, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """w [N, K] as (words uint32 [N, K · bits / 32], scales, biases bfloat16 [N, K / group]): the group's smallest value
    is its bias, its largest has the highest code."""
    most, per = 2**bits - 1, 32 // bits
    groups = w.view(len(w), -1, group)
    biases = groups.amin(-1)
    scales = ((groups.amax(-1) - biases).float() / most).clamp_(min=1e-8).bfloat16()
    q = groups.float().sub_(biases.float()[..., None]).div_(scales.float()[..., None]).round_().clamp_(0, most)
    words = q.to(torch.int32).view(len(w), -1, per)
    packed = torch.zeros(words.shape[:2], dtype=torch.int32, device=w.device)
    for place in range(per):
        packed |= words[..., place] << bits * place
    return packed.view(torch.uint32), scales, biases.bfloat16()


# Writing -----------------------------------------------------------------------------------------


def config(s: Size, shipped: dict) -> dict:
    """config.json; the special tokens' ids are the shipped tokenizer's."""
    text = {
        **shipped["text_config"],
        "vocab_size": s.vocab, "hidden_size": s.hidden, "intermediate_size": s.intermediate,
        "num_hidden_layers": s.layers, "num_attention_heads": s.heads, "num_key_value_heads": s.kv_heads,
        "head_dim": s.head_dim, "linear_key_head_dim": s.dim, "linear_value_head_dim": s.dim,
        "linear_num_key_heads": s.key_heads, "linear_num_value_heads": s.value_heads,
        "max_position_embeddings": s.positions, "tie_word_embeddings": s.tied,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
            "mrope_section": list(s.section), "mrope_interleaved": True,
        },
    }  # fmt: skip
    del text["layer_types"]
    vision = {
        **shipped["vision_config"],
        "depth": s.depth, "hidden_size": s.width, "num_heads": s.vision_heads,
        "intermediate_size": s.vision_intermediate, "out_hidden_size": s.hidden, "num_position_embeddings": s.table,
    }  # fmt: skip
    return {**shipped, "tie_word_embeddings": s.tied, "text_config": text, "vision_config": vision}


def tokenizer(shipped: dict, vocab: int) -> dict:
    """The shipped tokenizer, in which every further id is a word of its own, so that any reply can be read."""
    names = shipped["model"]["vocab"] | {token["content"]: token["id"] for token in shipped["added_tokens"]}
    wanted = range(max(names.values()) + 1, vocab)
    return {**shipped, "model": {**shipped["model"], "vocab": names | {"Ġ" + word(id): id for id in wanted}}}


def word(id: int) -> str:
    """Of letters, another for each id, and none that the shipped vocabulary holds."""
    letters = ""
    while id:
        id, letter = divmod(id, 20)
        letters += "bcdfghjklmnpqrstvwxz"[letter] + "aeiou"[(id + letter) % 5]
    return letters + "q"


def write(folder: Path, size: Size, bits: int | None = None, group: int = 64, device: str = "cpu") -> int:
    """A checkpoint, whole; returns its weights' bytes."""
    describe(folder, size, bits, group)
    plans = list(planned(size))
    return weights(folder, [part for plan in plans for part in mlx(plan, bits, group)] if bits else plans, device)


def describe(folder: Path, size: Size, bits: int | None, group: int) -> None:
    """Everything of a checkpoint but its weights."""
    source = Checkpoint(resolve(None))
    described = config(size, source.config)
    if bits:
        described["quantization"] = described["quantization_config"] = {"group_size": group, "bits": bits}
    folder.mkdir(parents=True, exist_ok=True)
    save = {"config.json": described, "generation_config.json": {**source.generation, "do_sample": False}}
    save["preprocessor_config.json"] = source.preprocessor | {"size": {"shortest_edge": 65536, "longest_edge": 1 << 24}}
    save["tokenizer.json"] = tokenizer(json.loads(source.tokenizer_path.read_bytes()), size.vocab)
    save["tokenizer_config.json"] = source.tokenizer_config
    for name, value in save.items():
        (folder / name).write_text(json.dumps(value))
    (folder / "chat_template.jinja").write_text(source.template)


def weights(folder: Path, plans: list[Planned], device: str = "cpu") -> int:
    """The planned tensors as shards with an index, several files at once; returns their bytes."""
    shards: list[list[Planned]] = [[]]
    for plan in plans:
        parts = plan.name.endswith((".scales", ".biases"))  # stay with their weight
        if sum(p.bytes for p in shards[-1]) + plan.bytes > SHARD and shards[-1] and not parts:
            shards.append([])
        shards[-1].append(plan)
    names = [f"model-{i + 1:05}-of-{len(shards):05}.safetensors" for i in range(len(shards))]
    with ThreadPoolExecutor(THREADS) as pool:
        list(pool.map(lambda name, shard: write_file(folder / name, shard, device), names, shards))
    index = {plan.name: name for name, shard in zip(names, shards) for plan in shard}
    total = sum(plan.bytes for plan in plans)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": total}, "weight_map": index})
    )
    return total


def write_file(path: Path, plans: list[Planned], device: str) -> None:
    entries, end = {}, 0
    for plan in plans:
        offsets = [end, end := end + plan.bytes]
        entries[plan.name] = {"dtype": NAMES[plan.dtype], "shape": list(plan.shape), "data_offsets": offsets}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    generator = torch.Generator(device)
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for plan in plans:
            generator.manual_seed(zlib.crc32(normalised(plan.name).encode()))
            tensor = plan.make(generator)
            if tensor.shape != plan.shape or tensor.dtype != plan.dtype:
                raise ValueError(f"{plan.name} came as {tensor.dtype} {list(tensor.shape)}")
            file.write(memoryview(tensor.cpu().reshape(-1).view(torch.uint8).numpy()))


def repacked(source: Checkpoint, folder: Path, bits: int, group: int) -> None:
    """A bf16 checkpoint's own weights once more, in MLX's layout."""
    tensors = source.tensors()
    plans = [Planned(name, t.shape, t.dtype, lambda g, t=t: t) for name in tensors for t in [tensors[name]]]
    weights(folder, [part for plan in plans for part in mlx(plan, bits, group)])
    quantization = {"group_size": group, "bits": bits}
    for path in source.path.iterdir():
        if path.suffix in (".json", ".jinja") and path.name != "model.safetensors.index.json":
            (folder / path.name).write_bytes(path.read_bytes())
    (folder / "config.json").write_text(json.dumps(source.config | {"quantization": quantization}))


# Weights without a file -----------------------------------------------------------------------------


class Drawn(Checkpoint):
    """The checkpoint that `write` makes, in a folder that holds everything but the weights: they are drawn on the
    device as they are asked for."""

    def __init__(self, folder: Path, size: Size, bits: int | None = None, group: int = 64):
        describe(folder, size, bits, group)
        self.path, self.size, self.packing = folder, size, Form(bits, group) if bits else None
        self.config = self._json("config.json")

    def tensors(self, device: torch.device | str = "cpu") -> Numbers:
        return Numbers(self.size, self.packing, device)


class Numbers:
    """What a family asks of `Checkpoint.tensors`."""

    def __init__(self, size: Size, packing: Form | None, device: torch.device | str):
        self.plans, self.packing, self.taken = {plan.name: plan for plan in planned(size)}, packing, set()
        self.generator = torch.Generator(device)

    def form(self, name: str) -> Form | None:
        packed = self.packing is not None and is_packed(name, self.plans[name].shape, self.packing.group)
        return self.packing if packed else None

    def take(self, name: str, shape: tuple[int, ...]) -> Tensor:
        return self._drawn(name, shape) if self.form(name) is None else self.affine(name, shape).dequantised()

    def affine(self, name: str, shape: tuple[int, ...]) -> Affine | None:
        if self.form(name) is None:
            return None
        return Affine(*quantised(self._drawn(name, shape), *self.packing), *self.packing)

    def _drawn(self, name: str, shape: tuple[int, ...]) -> Tensor:
        plan = self.plans[name]
        if plan.shape != tuple(shape):
            raise ValueError(f"{name} is {list(plan.shape)} here, and was asked for as {list(shape)}")
        self.taken.add(name)
        self.generator.manual_seed(zlib.crc32(name.encode()))
        return plan.make(self.generator)

    def leftover(self, drop: list[str] = ()) -> list[str]:
        return sorted(self.plans.keys() - self.taken)


# The command -------------------------------------------------------------------------------------


def read(folder: Path, device: str) -> None:
    """Read every tensor once, in the families' order, and drop it."""
    checkpoint = Checkpoint(folder)
    size = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    for name in ("first", "again"):
        tensors = checkpoint.tensors(device)
        began = time.perf_counter()
        for tensor in tensors:
            tensors.affine(tensor, tensors.shape(tensor)) or tensors.take(tensor)
        if device != "cpu":
            torch.cuda.synchronize(device)
        seconds = time.perf_counter() - began
        print(f"{name}: {size / 1e9:.2f} GB to {device} in {seconds:.2f} s, {size / seconds / 1e9:.2f} GB/s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=[*SIZES, "read"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--bits", type=int, choices=(4, 8))
    parser.add_argument("--group", type=int, choices=(32, 64, 128), default=64)
    parser.add_argument("--device", default="cuda:0" if torch.cuda.is_available() else "cpu")
    options = parser.parse_args()
    if options.what == "read":
        return read(options.folder, options.device)
    began = time.perf_counter()
    size = write(options.folder, SIZES[options.what], options.bits, options.group, options.device)
    seconds = time.perf_counter() - began
    print(f"{options.folder}: {size / 1e9:.2f} GB in {seconds:.1f} s, {size / seconds / 1e9:.2f} GB/s")


if __name__ == "__main__":
    main()
