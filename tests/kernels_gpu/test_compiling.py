"""Kernels are compiled, not run, for a device that is not here."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget
from triton.runtime._async_compile import active_mode
from triton.runtime.driver import driver

from tfmagic.kernels.gpu import norm
from tfmagic.kernels.gpu.common import INTERPRETED
from tfmagic.kernels.gpu.compiling import compiled_only

pytestmark = pytest.mark.skipif(INTERPRETED, reason="what is interpreted cannot be compiled")


class Driver:
    """Of a device that is not here: enough for Triton to build for it."""

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def launcher_cls(self, source, metadata):
        """What would be built by a C compiler."""
        return "a launcher"


def test_kernels_are_built_and_not_run(monkeypatch, tmp_path):
    monkeypatch.setattr(driver, "_active", Driver())
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(norm, "launchable", lambda x: True)
    norm._rms.device_caches.pop(0, None)
    x, w = torch.ones(3, 384, dtype=torch.bfloat16), torch.ones(384)
    try:
        with compiled_only(2):
            norm.rms(x, w, 1e-6)
            norm.rms(x[:2], w, 1e-6)
        (kernel,) = norm._rms.device_caches[0][0].values()
        assert kernel.asm["cubin"] and kernel._run == "a launcher" and (x == 1).all()
        with compiled_only(2), mock.patch.object(norm._rms, "compile", side_effect=AssertionError("built twice")):
            norm.rms(x, w, 1e-6)
    finally:
        norm._rms.device_caches.pop(0, None)


def test_what_is_no_kernel_of_triton_s_is_compiled_beside_them(monkeypatch):
    """As those of CUDA C++ are."""
    monkeypatch.setattr(driver, "_active", Driver())
    with compiled_only(2):
        found = active_mode.get().executor.submit(divmod, 7, 2)
    assert found.result(0) == (3, 1)
