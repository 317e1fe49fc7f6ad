"""Kernels in CUDA C++, for what Triton cannot say: compiled by NVRTC when first wanted, kept where Triton keeps its
own, launched through the driver on PyTorch's stream, into a graph that is being captured too.

A source is a `.cu` file beside its Python; it has one kernel, named as the file, and takes one struct. Its -D names are
all that a kernel is specialised by.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from concurrent.futures import Future
from importlib.resources import files
from pathlib import Path
from threading import Lock
from typing import NamedTuple

import torch

from .common import triton
from .compiling import COMPILING
from .tiles import SHARED

try:
    from cuda.bindings import driver, nvrtc
except ImportError:
    driver = nvrtc = None

OPTIONS = ("--std=c++17", "--fmad=false")
"""What a kernel multiplies and adds in one step, it says: so the bits are those that its source gives."""
BUILT: dict[tuple, Future] = {}
"""What `kernel` was asked for: built, or being built."""
BUILDING = Lock()
"""Held while BUILT is looked into."""


class CudaError(RuntimeError):
    """What NVRTC or the driver says of a call that failed."""


def checked(answer: tuple):
    """A binding's answer (status, results...) without the status. Raises CudaError."""
    status, *found = answer
    if status.value:
        raise CudaError(f"{type(status).__name__}: {status.name}")
    return found[0] if len(found) == 1 else found


@functools.cache
def available(device: torch.device) -> bool:
    """Whether kernels of this form run there: on Hopper, where their bits were measured."""
    if driver is None or triton is None or device.type != "cuda" or torch.cuda.get_device_capability(device)[0] != 9:
        return False
    try:
        return bool(checked(nvrtc.nvrtcVersion()))
    except Exception:  # its library is not there
        return False


def source(name: str) -> bytes:
    """The text of `name`.cu, UTF-8."""
    return files(__package__).joinpath(f"{name}.cu").read_bytes()


def compiled(name: str, architecture: str, defines: tuple[tuple[str, int], ...]) -> bytes:
    """The machine code (cubin) of `name`.cu, for "sm_90a", say. Raises CudaError with the compiler's words."""
    text, options = source(name), [f"--gpu-architecture={architecture}", *OPTIONS, *(f"-D{k}={v}" for k, v in defines)]
    program = checked(nvrtc.nvrtcCreateProgram(text, f"{name}.cu".encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        if status.value:
            log = bytearray(checked(nvrtc.nvrtcGetProgramLogSize(program)))
            nvrtc.nvrtcGetProgramLog(program, log)
            raise CudaError(f"{name}.cu does not compile: {log.decode(errors='replace').strip(chr(0))}")
        code = bytearray(checked(nvrtc.nvrtcGetCUBINSize(program)))
        checked(nvrtc.nvrtcGetCUBIN(program, code))
        return bytes(code)
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def kernel(name: str, architecture: str, defines: tuple[tuple[str, int], ...]):
    """A kernel that is ready to be launched; threads that want the same one wait for it. Raises CudaError."""
    key = name, architecture, defines
    with BUILDING:
        mine = key not in BUILT
        found = BUILT.setdefault(key, Future())
    if mine:
        try:
            found.set_result(loaded(*key))
        except BaseException as error:
            del BUILT[key]  # the next one tries again
            found.set_exception(error)
    return found.result()


def loaded(name: str, architecture: str, defines: tuple[tuple[str, int], ...]):
    """A kernel from Triton's cache of compiled ones, or else compiled into it."""
    from triton.runtime.cache import get_cache_manager

    facts = source(name), architecture, defines, OPTIONS, checked(nvrtc.nvrtcVersion())
    cache, file = get_cache_manager(hashlib.sha256(repr(facts).encode()).hexdigest()), f"{name}.cubin"
    found = cache.get_file(file) or cache.put(compiled(name, architecture, defines), file)
    code = Path(found).read_bytes()
    library = checked(driver.cuLibraryLoadData(code, [], [], 0, [], [], 0))
    return checked(driver.cuLibraryGetKernel(library, name.encode()))


@functools.cache
def architecture(device: torch.device) -> str:
    """"sm_90a" of a Hopper: with what only that generation has."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}{'a' if major >= 9 else ''}"


class LaunchConfig(NamedTuple):
    """How a kernel is launched."""

    programs: int
    threads: int
    shared: int
    """Bytes of shared memory of each program."""
    cluster: int = 1
    """Programs that reach each other's shared memory; they divide `programs`."""
    early: bool = False
    """It may begin beside the kernel before it: see `wait_for_last` in common."""


def launch(
    name: str, device: torch.device, defines: dict[str, int], params: ctypes.Structure, config: LaunchConfig
) -> None:
    """Launch a kernel on the current stream; within `compiled_only` one of its threads builds it. Raises CudaError."""
    key = name, architecture(device), tuple(defines.items())
    if COMPILING.get():
        from triton.runtime._async_compile import active_mode

        active_mode.get().executor.submit(kernel, *key)
        return
    found = kernel(*key)
    allow_all(found, device)
    stream, attrs = torch.cuda.current_stream(device).cuda_stream, attributes(config)
    told = driver.CUlaunchConfig()
    told.gridDimX, told.gridDimY, told.gridDimZ = config.programs, 1, 1
    told.blockDimX, told.blockDimY, told.blockDimZ = config.threads, 1, 1
    told.sharedMemBytes, told.hStream, told.attrs, told.numAttrs = config.shared, stream, attrs, len(attrs)
    pointer = (ctypes.c_void_p * 1)(ctypes.addressof(params))
    checked(driver.cuLaunchKernelEx(told, driver.CUfunction(int(found)), ctypes.addressof(pointer), 0))


def attributes(config: LaunchConfig) -> list:
    """What the driver is told besides (CUDA driver API, CUlaunchAttribute)."""
    kinds, found = driver.CUlaunchAttributeID, []
    if config.early:
        found.append(driver.CUlaunchAttribute())
        found[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        found[-1].value.programmaticStreamSerializationAllowed = 1
    if config.cluster > 1:
        found.append(driver.CUlaunchAttribute())
        found[-1].id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster = found[-1].value.clusterDim
        cluster.x, cluster.y, cluster.z = config.cluster, 1, 1
    return found


@functools.cache
def allow_all(found, device: torch.device) -> None:
    """Let the programs of a kernel have all shared memory that there is."""
    kind = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    checked(driver.cuKernelSetAttribute(kind, SHARED, found, driver.CUdevice(device.index or 0)))
