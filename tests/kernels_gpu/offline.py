"""Compiles what a call would launch for sm_90, on a machine without a GPU.

`launches` runs a public function over tensors without memory and notes its kernels' launches; `compiled` builds one as
Triton's launcher would and reads what the machine code takes.
"""

from __future__ import annotations

import contextlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

TYPES = {
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.uint8: "u8",
    torch.int8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.uint32: "u32",
    torch.int64: "i64",
    torch.uint64: "u64",
    torch.bool: "i1",
}
SHARED = 227 * 1024
"""Bytes of shared memory that a program may have on Hopper."""


class Launch(NamedTuple):
    kernel: JITFunction
    args: tuple
    options: dict[str, Any]


class Built(NamedTuple):
    registers: int
    stack: int
    """Bytes of a thread's local memory: spilled registers, if anything."""
    shared: int
    sass: str
    ttgir: str
    """Triton's own form of it, layouts and all."""


def launches(call: Callable[[], Any], *modules) -> list[Launch]:
    """The launches of `call`, in order, of kernels in `modules` (those of `kernels.gpu` that it goes through)."""
    found: list[Launch] = []
    with contextlib.ExitStack() as stack:
        for module in modules:
            if hasattr(module, "launchable"):
                stack.enter_context(mock.patch.object(module, "launchable", lambda x: True))
            if hasattr(module, "processors"):
                stack.enter_context(mock.patch.object(module, "processors", lambda device: 132))
        stack.enter_context(
            mock.patch.object(
                JITFunction,
                "__getitem__",
                lambda kernel, grid: lambda *args, **options: found.append(Launch(kernel, args, options)),
            )
        )
        call()
    return found


def compiled(launch: Launch) -> Built:
    """Built for an H200. Raises what Triton raises."""
    kernel, args, options = launch
    signature, constants, attributes = {}, {}, {}
    for i, (param, value) in enumerate(zip(kernel.params, args, strict=True)):
        kind, hints = typed(value)
        if param.is_constexpr or (value is None) or (kind == "i32" and value == 1 and not param.do_not_specialize):
            signature[param.name], constants[param.name] = "constexpr", value
            continue
        signature[param.name] = kind
        if hints and not param.do_not_specialize:
            attributes[(i,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    built = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(built.asm["cubin"])
        usage, sass = (dump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    numbers = {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}
    return Built(numbers["REG"], numbers["STACK"] + numbers["LOCAL"], built.metadata.shared, sass, built.asm["ttgir"])


def typed(value: Any) -> tuple[str, bool]:
    """Triton's type of an argument, and whether it is known to be a multiple of 16."""
    if isinstance(value, torch.Tensor):
        return "*" + TYPES[value.dtype], value.data_ptr() % 16 == 0
    if isinstance(value, (bool, type(None))):
        return "i1", False
    if isinstance(value, int):
        return "i32" if -(2**31) <= value < 2**31 else "i64", value % 16 == 0
    if isinstance(value, float):
        return "fp32", False
    block = list(value.block_shape)
    return f"tensordesc<{TYPES[value.base.dtype]}{block}>", False


def loops(sass: str) -> list[list[str]]:
    """The instructions of each loop that holds no other."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?\s*(\S[^;]*);", sass)
    places = {int(at, 16): i for i, (at, _) in enumerate(lines)}
    found = []
    for i, (_, op) in enumerate(lines):
        target = re.search(r"^BRA.* 0x([0-9a-f]+)", op)
        if target and places.get(int(target[1], 16), i) < i:
            found.append((places[int(target[1], 16)], i))
    inner = [(a, b) for a, b in found if not any(a <= c and d <= b and (a, b) != (c, d) for c, d in found)]
    return [[op for _, op in lines[a : b + 1]] for a, b in inner]


def dump(option: str, path: str) -> str:
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    return subprocess.run([tool, option, path], capture_output=True, text=True, check=True).stdout


def tensors(*shapes_and_types: tuple) -> Iterator[torch.Tensor]:
    """Tensors without memory."""
    for *shape, dtype in shapes_and_types:
        yield torch.empty(*shape, dtype=dtype, device="meta")
