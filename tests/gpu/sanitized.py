"""The CUDA C++ kernels once each, small, for NVIDIA's checker of memory accesses and races:

    compute-sanitizer --report-api-errors no --tool memcheck|racecheck --error-exitcode 9 python -m tests.gpu.sanitized

Without that option it takes calls that an older driver does not know for errors.
"""

from __future__ import annotations

import torch

from tfmagic.kernels.gpu.affine import Affine, affine
from tfmagic.kernels.gpu.epilogue import GATED, PLAIN
from tfmagic.kernels.gpu.tiles import Tile

TRIED = [
    (4, 64, 1, Tile("direct", 8, 48, 256)),
    (4, 64, 8, Tile("direct", 16, 32, 256, parts=2)),
    (4, 32, 8, Tile("direct", 16, 16, 256, parts=8)),
    (8, 64, 2, Tile("direct", 8, 32, 256, early=True)),
    (4, 64, 2, Tile("wide", 32, 128, 256)),
    (4, 128, 4, Tile("wide", 64, 64, 256, parts=4)),
    (8, 32, 1, Tile("wide", 16, 64, 256)),
]
"""Bits, group, slices, tile."""


def main() -> None:
    torch.manual_seed(0)
    n, k = 400, 16 * 128
    for bits, group, slices, tile in TRIED:
        q = torch.randint(-(2**31), 2**31 - 1, (n, k * bits // 32), device="cuda", dtype=torch.int32).view(torch.uint32)
        scales = (torch.rand(n, k // group, device="cuda") + 0.5) / 2**bits
        w, x = Affine(q, scales, -scales, bits, group), torch.randn(tile.rows - 3, k, device="cuda").bfloat16()
        w.slices = slices
        print(bits, group, slices, tile, flush=True)
        for what in (PLAIN, GATED):
            found, expected = (torch.empty(len(x), n // (1 + what), device="cuda") for _ in range(2))
            affine(x, w, what, None, found, tile)
            affine(x, w, what, None, expected, Tile("stream", 16, 64, 128, 4, 3))
            assert torch.equal(found, expected), (bits, group, slices, tile, what)
    print("equal")


if __name__ == "__main__":
    main()
