"""Whole passes of a small model by the Triton forms, in Triton's interpreter, against their twins: what the engine
hands to a kernel is what the kernel takes."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

from tests.bench.checkpoints import SIZES, write

from .interpreted import passes

pytest.importorskip("triton")
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]


@pytest.mark.parametrize("kv", ["bf16", "fp8"])
def test_the_triton_forms_pass_as_the_twins_do(kv, tmp_path):
    write(tmp_path / "tiny", SIZES["tiny"])
    expected = passes(tmp_path / "tiny", kv)
    command = [sys.executable, "-m", "tests.families_gpu.interpreted", tmp_path / "tiny", kv, tmp_path / "out"]
    subprocess.run(command, check=True, env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"})
    found = torch.load(tmp_path / "out")
    assert found.keys() == expected.keys()
    for name, x in expected.items():
        error = (found[name].float() - x.float()).norm() / x.float().norm()
        assert float(error) < (0.15 if x.dtype == torch.float8_e4m3fn else 0.06), name
