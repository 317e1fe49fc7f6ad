"""The Triton forms on a CPU: numbers in Triton's interpreter, and compiled for a GPU that is not here.

The interpreter is chosen by TRITON_INTERPRET=1 before anything imports Triton, and what is interpreted cannot be
compiled. So the files here are for a process of their own, which `test_interpreter` starts; to run one of them:
TRITON_INTERPRET=1 pytest tests/kernels_gpu/test_linear.py
"""

from __future__ import annotations

from pathlib import Path

from tfmagic.kernels.gpu.common import INTERPRETED

OUTSIDE = ("test_interpreter", "test_compile", "test_cuda")

if INTERPRETED:
    from tests.kernels_gpu.mended import mend

    mend()


def pytest_ignore_collect(collection_path: Path) -> bool | None:
    if collection_path.suffix == ".py" and collection_path.name.startswith("test_"):
        return True if collection_path.name.startswith(OUTSIDE) == INTERPRETED else None
    return None
