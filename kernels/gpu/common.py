"""What every kernel of the bf16 form shares.

Each operation has a public function, a Triton form and a torch twin in one file. The public function runs the twin for
tensors in host memory and the Triton form on a GPU; with TRITON_INTERPRET=1 in the environment when this is imported,
Triton's interpreter runs the Triton form on the CPU, which is how the forms are tested where there is no GPU.

Triton comes with the `gpu` extra alone. Without it every module here still imports: kernels stay plain functions that
nobody calls.
"""

from __future__ import annotations

import functools
import os

import torch
from torch import Tensor

from tfmagic.errors import Refusal

try:
    import triton
    import triton.language as tl

    from .compiling import Kernel
except ImportError:
    triton = tl = None

INTERPRETED = triton is not None and os.environ.get("TRITON_INTERPRET", "0").lower() in ("1", "true", "on", "y")
"""Kernels run in Triton's interpreter, on CPU tensors."""

EARLY = not INTERPRETED
"""A round's kernels are in place before those ahead of them end. False: each is launched when the last has ended."""

if INTERPRETED:
    from triton.runtime import interpreter

    def _patch_tensor(tensor, scope, patch=interpreter._patch_lang_tensor):
        """Triton 3.6 takes a loop's bounds with int(array of one number), which NumPy 2.4 refuses."""
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda x: int(x.handle.data.item()))

    interpreter._patch_lang_tensor = _patch_tensor


def jit(f=None, **options):
    """`triton.jit`, with its options or without; the function as it is where there is no Triton."""
    if f is None:
        return functools.partial(jit, **options)
    if triton is None:
        return f
    return triton.jit(f, **options) if INTERPRETED else Kernel(f, **options)


def constexpr_function(f):
    """`triton.constexpr_function`: f runs while a kernel is compiled."""
    return f if triton is None else triton.constexpr_function(f)


def launchable(x: Tensor) -> bool:
    """Whether the Triton form runs for x; the twin does otherwise. Raises Refusal for a GPU without Triton."""
    if x.is_cuda and triton is None:
        raise Refusal("A GPU needs Triton, which is not installed.", "Install tfmagic[gpu], or use --device cpu.")
    return x.is_cuda or INTERPRETED


@functools.cache
def processors(device: torch.device) -> int:
    """Streaming multiprocessors of a device; a few for the interpreter."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 3


def descriptor(x: Tensor, rows: int, columns: int):
    """How the copy engine moves blocks of a matrix; places outside it read as zeros and are not written. x and its rows
    start at multiples of 16 bytes."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor(x, list(x.shape), list(x.stride()), [rows, columns])


def copyable(x: Tensor) -> bool:
    """Whether the copy engine takes it: base and rows on multiples of 16 bytes."""
    return x.data_ptr() % 16 == 0 and x.stride(0) * x.element_size() % 16 == 0


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power_of_two(n: int) -> int:
    """The least power of two that is at least n."""
    return 1 << max(n - 1, 0).bit_length()


@jit
def dot(a, b, acc, WIDEN: tl.constexpr):
    """acc + a · b with bf16 operands and float32 sums. WIDEN (for the interpreter, which gets bf16 products wrong):
    operands are widened first, which changes no product."""
    if WIDEN:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:
        return tl.dot(a, b, acc)


@jit
def let_next_start(EARLY: tl.constexpr):
    """Lets the next kernel's programs come in beside this one's, if it is launched for that (see `wait_for_last`)."""
    if EARLY:
        tl.extra.cuda.gdc_launch_dependents()


@jit
def wait_for_last(EARLY: tl.constexpr):
    """In a kernel launched with `launch_pdl`, before anything of an earlier kernel is read or written over: what was
    launched before is done. That holds for all of it, since every such kernel waits."""
    if EARLY:
        tl.extra.cuda.gdc_wait()


@jit
def take_turn(EARLY: tl.constexpr):
    """The head of a small kernel that is launched with `launch_pdl`: its programs are in place when their turn comes,
    and so are the next kernel's."""
    let_next_start(EARLY)
    wait_for_last(EARLY)


@jit
def fetch(lines):
    """Asks for the 128-byte lines at these addresses to be brought into the L2 cache."""
    tl.inline_asm_elementwise("prefetch.global.L2 [$1]; mov.u32 $0, 0;", "=r,l", [lines], tl.int32, False, 1)


@jit
def on_fp8_grid(x):
    """float32 x rounded to what e4m3 holds, ties to even, at most 448 in magnitude: casting it to float8e4nv is then
    exact. (The interpreter's own cast does not round.)"""
    bits = x.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.maximum(bits.to(tl.float32, bitcast=True), 0.015625)  # of the leading place; e4m3's least normal
    shift = power * 1572864.0  # 1.5 · 2^20: a float32 sum with it keeps three places behind the leading one
    return tl.minimum(tl.maximum((x + shift) - shift, -448.0), 448.0)
