"""Numbers that are brought to the host: all of them, and no others."""

from __future__ import annotations

import pytest
import torch

from tfmagic.kernels.gpu.bring import WORDS, bring


@pytest.mark.parametrize("n", [4, WORDS, 3 * WORDS + 12])
def test_all_of_them_and_no_others(n):
    x, host = torch.arange(1, n + 1, dtype=torch.int32), torch.zeros(n + 4, dtype=torch.int32)
    bring(x, host[:n])
    assert torch.equal(host[:n], x) and not host[n:].any()
