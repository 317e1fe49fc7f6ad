"""Whose states these are: everything that could change a bit of a state, as facts, and the directory of that digest.

Not among the facts is what the row law takes out: threads, the batch, how a prompt was cut, sampling, and the drafter,
for a state holds nothing but rows of the target's prompt pass.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import msgspec

VERSION = 1
"""Raised when the file format or what a key's rows mean changes."""
WHOLE = 1 << 30
"""Bytes of weights that are read in full for their digest."""
SAMPLE, SAMPLES = 1 << 16, 64
CODE = Path(__file__).resolve().parents[1]
"""The engine's own sources; `kernels` lies beside them."""
SOURCES = (".py", ".cu", ".cuh", ".cpp", ".h")
ASIDE = ("embedded", "resident")
"""Folders of the engine in which nothing computes a state."""
PACKAGES = ("torch", "numpy", "pillow", "triton", "cuda-bindings")
ENVIRONMENT = ("MKL_CBWR", "MKL_ENABLE_INSTRUCTIONS", "ONEDNN_MAX_CPU_ISA", "NVIDIA_TF32_OVERRIDE")
"""Variables that choose among kernels of the libraries."""


def facts(checkpoint, device: str, kv: str = "own") -> dict[str, str]:
    """Name → value or digest. `kv`: the form of keys and values."""
    import torch

    small = sorted(p for p in checkpoint.path.iterdir() if p.suffix in (".json", ".jinja") and p.is_file())
    return {
        "version": str(VERSION),
        "model": checkpoint.name,
        "device": device_name(device),
        "files": digest(*(part for path in small for part in (path.name.encode(), path.read_bytes()))),
        "weights": weights(checkpoint.path),
        "kv": kv,
        "code": code(),
        "packages": " ".join(f"{name}={version(name)}" for name in PACKAGES),
        "torch": digest(torch.__config__.show().encode(), str(torch.version.git_version).encode()),
        "precision": f"{torch.get_float32_matmul_precision()} {torch.are_deterministic_algorithms_enabled()}",
        "machine": f"{platform.machine()} {sys.byteorder} {torch.backends.cpu.get_cpu_capability()}",
        "environment": " ".join(f"{name}={os.environ.get(name, '')}" for name in ENVIRONMENT),
    }


def name(facts: Mapping[str, str]) -> str:
    """The namespace: the model's name, legible, and the digest of all facts."""
    slug = re.sub(r"[^A-Za-z0-9.-]+", "-", facts["model"]).strip(".-")[:40] or "model"
    return f"{slug}-{digest(msgspec.json.encode(sorted(facts.items())))}"


def digest(*parts: bytes) -> str:
    """32 hex digits over the parts, each with its length."""
    running = hashlib.blake2b(digest_size=16)
    for part in parts:
        running.update(len(part).to_bytes(8, "little"))
        running.update(part)
    return running.hexdigest()


def weights(folder: Path) -> str:
    """A digest of the weight files: of every byte up to `WHOLE` in all; of larger ones the name, size, time of change,
    header and `SAMPLES` pieces, since reading them in full would take longer than what it saves."""
    files = sorted(folder.glob("*.safetensors"))
    whole = sum(path.stat().st_size for path in files) <= WHOLE
    running = hashlib.blake2b(digest_size=16)
    for path in files:
        status = path.stat()
        running.update(f"{path.name} {status.st_size}\n".encode())
        with open(path, "rb") as file:
            if whole:
                while piece := file.read(8 << 20):
                    running.update(piece)
                continue
            running.update(str(status.st_mtime_ns).encode())
            length = int.from_bytes(file.read(8), "little")
            running.update(file.read(min(length, 100_000_000)))
            for i in range(SAMPLES):
                file.seek(i * status.st_size // SAMPLES)
                running.update(file.read(SAMPLE))
    return running.hexdigest()


def code() -> str:
    """A digest of the sources that compute: another build is another namespace."""
    roots = (CODE, CODE.parent / "kernels")
    files = sorted(path for root in roots for path in root.rglob("*") if path.suffix in SOURCES)
    files = [path for path in files if path.relative_to(CODE.parent).parts[1] not in ASIDE]
    return digest(*(p for path in files for p in (str(path.relative_to(CODE.parent)).encode(), path.read_bytes())))


def version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "none"


def device_name(device: str) -> str:
    """The device's make, not its number: two equal GPUs compute equal bits."""
    import torch

    if not device.startswith("cuda"):
        return f"cpu {cpu()}"
    make = torch.cuda.get_device_properties(device)
    driver = first_line("/proc/driver/nvidia/version", "")
    libraries = f"cuda {torch.version.cuda} cudnn {torch.backends.cudnn.version()}"
    return f"{make.name} {make.major}.{make.minor} {make.multi_processor_count} {libraries} {driver}"


def cpu() -> str:
    """The processor's name and a digest of its instruction sets: libraries choose kernels by them."""
    model = first_line("/proc/cpuinfo", "model name") or platform.processor()
    return f"{model} {digest(first_line('/proc/cpuinfo', 'flags').encode())}"


def first_line(path: str, start: str) -> str:
    """The first line that begins so, without its name; "" where there is none."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return next((line.partition(":")[2].strip() for line in file if line.startswith(start)), "")
    except OSError:
        return ""
