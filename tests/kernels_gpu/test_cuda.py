"""Kernels in CUDA C++, built for an H200 where there is no GPU; what they say is tested on one (tests/gpu)."""

from __future__ import annotations

import re
import tempfile
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

pytest.importorskip("triton")
pytest.importorskip("cuda.bindings")

import torch

from tests.kernels_gpu.offline import dump
from tfmagic.kernels.gpu import affine, cuda, tiles
from tfmagic.kernels.gpu.compiling import compiled_only
from tfmagic.kernels.gpu.tiles import Tile


def built(**defines: int) -> tuple[dict[str, int], str]:
    """(what a thread takes of registers and of local memory, the machine code) of affine.cu."""
    code = cuda.compiled("affine", "sm_90a", tuple(defines.items()))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(code)
        usage, sass = (dump(option, file.name) for option in ("--dump-resource-usage", "--dump-sass"))
    return {key: int(n) for key, n in re.findall(r"(REG|STACK|LOCAL):(\d+)", usage)}, sass


def step_loop(sass: str, op: str) -> list[str]:
    """The instructions of the shortest loop around the products of two steps."""
    lines = re.findall(r"/\*([0-9a-f]{4,5})\*/\s+(?:@!?U?P\w+ )?\s*(\S[^;]*);", sass)
    places, found = {int(at, 16): i for i, (at, _) in enumerate(lines)}, []
    for i, (_, text) in enumerate(lines):
        target = re.search(r"^BRA.* 0x([0-9a-f]+)", text)
        if target and places.get(int(target[1], 16), i) < i:
            body = [one for _, one in lines[places[int(target[1], 16)] : i + 1]]
            if sum(one.startswith(op) for one in body) >= 16:
                found.append(body)
    return min(found, key=len)


@pytest.mark.parametrize(
    ("rows", "wide", "threads", "op", "most"),
    [(8, 0, 768, "HMMA", 280), (16, 0, 640, "HMMA", 310), (32, 1, 640, "HGMMA", 330), (64, 1, 512, "HGMMA", 330)],
)
def test_few_rows_keep_up_with_memory(rows, wide, threads, op, most):
    """A warp's loop, two steps of 16 outputs: memory gives a processor's four quarters such a step each in some 250
    cycles. Nothing goes by way of memory."""
    _, sass = built(BITS=4, GROUP=64, ROWS=rows, WIDE=wide, THREADS=threads)
    loop = step_loop(sass, op)
    assert len(loop) <= most and sum("HFMA2.BF16" in one for one in loop) == 64
    assert not [one for one in loop if one.startswith(("LDL", "STL"))]
    assert re.search(r"LDG\.E\S*\.128", sass) and "ACQBULK" in sass
    if not wide:  # nobody waits for codes with all others behind him, and the next ones are soon asked for
        place = {one.split()[0].split(".")[0]: i for i, one in reversed([*enumerate(loop)])}
        last = max(i for i, one in enumerate(loop) if one.startswith("LDG."))
        assert place["BAR"] < place["HFMA2"] and last < 0.8 * len(loop)


@pytest.mark.long
@pytest.mark.parametrize(("bits", "group"), [(bits, group) for bits in (4, 8) for group in (32, 64, 128)])
def test_every_format_is_built(bits, group):
    for rows, wide in ((8, 0), (16, 0), (32, 1), (64, 1)):
        for threads in (512, 768):
            taken, sass = built(BITS=bits, GROUP=group, ROWS=rows, WIDE=wide, THREADS=threads)
            assert ("HGMMA" in sass) == bool(wide) and taken["STACK"] <= 300


@pytest.mark.parametrize(("bits", "group"), [(4, 64), (8, 32)])
def test_where_a_thread_reads_is_what_the_tensor_cores_want_of_it(bits, group):
    """The addresses of `fetch` and the order of `take_values`, against the fragment of mma.m16n8k16 (PTX ISA, "Matrix
    fragments for mma.m16n8k16"): thread 4 g + t has rows g and g + 8, inputs 2 t, 2 t + 1 and those 8 behind them."""
    g = torch.Generator().manual_seed(0)
    n, k, block, step = 48, 384, 2, 1
    codes = torch.randint(0, 2**bits, (n, k), generator=g, dtype=torch.int32)
    scales, biases = (torch.rand(n, k // group, generator=g).bfloat16() for _ in range(2))
    units, words = affine.pack(codes, scales, biases, bits, group)
    memory, steps, groups = units.view(torch.int32).flatten(), units.shape[1], 128 // group
    for lane in range(32):
        row, t = lane // 4, lane % 4
        for half in range(2):
            line = (block * steps + step) * 16 + row + 8 * half
            own = 16 * block + row + 8 * half
            biased = (words.flatten()[line * groups :][:groups] >> 16).to(torch.int16).view(torch.bfloat16)
            assert torch.equal(biased / affine.BIAS, biases[own, step * groups :][:groups])
            planes = 16 // bits
            for run in range(4):
                four = memory[line * 4 * bits + run // planes * 16 + 4 * t :][:4]
                for i, word in enumerate(four.tolist()):
                    pair = [(word >> shift + run % planes * bits) & (2**bits - 1) for shift in (0, 16)]
                    inputs = step * 128 + run * 32 + i // 2 * 16 + i % 2 * 8 + 2 * t
                    assert pair == codes[own, inputs : inputs + 2].tolist()


def test_what_a_kernel_takes_is_what_is_given():
    """Names and order of the struct on both sides."""
    body = re.search(r"struct Params \{(.*?)\};", cuda.source("affine").decode(), re.DOTALL)[1]
    names = [
        name.strip(" *")
        for line in re.findall(r"(?:const )?(?:u16|u32|void|int)\*? ([^;]*);", body)
        for name in line.split(",")
    ]
    assert names == [name for name, _ in affine.Params._fields_]


def test_the_compilers_words_are_told():
    with pytest.raises(cuda.CudaError, match=r"affine.cu does not compile: .*GROUP"):
        cuda.compiled("affine", "sm_90a", (("BITS", 4),))


def test_a_kernel_is_built_once_for_all_who_want_it(monkeypatch):
    calls = []

    def slow(*key):
        calls.append(key)
        if len(calls) == 1:
            raise cuda.CudaError("not now")
        return object()

    monkeypatch.setattr(cuda, "BUILT", {})
    monkeypatch.setattr(cuda, "loaded", slow)
    with pytest.raises(cuda.CudaError, match="not now"):
        cuda.kernel("affine", "sm_90a", ())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: cuda.kernel("affine", "sm_90a", ()), range(8)))
    assert len(calls) == 2 and len(set(map(id, found))) == 1


def test_the_warm_up_builds_in_its_threads_and_launches_nothing(monkeypatch):
    threads, wanted = [], threading.Barrier(2)

    def slow(*key):
        threads.append(threading.current_thread())
        wanted.wait(30)  # two at once, or the warm-up would build one after another
        return object()

    monkeypatch.setattr(cuda, "BUILT", {})
    monkeypatch.setattr(cuda, "loaded", slow)
    monkeypatch.setattr(cuda, "architecture", lambda device: "sm_90a")
    config = cuda.LaunchConfig(1, 32, 0)
    with compiled_only(2):
        for rows in (8, 16, 8, 16):
            cuda.launch("affine", torch.device("cpu"), {"ROWS": rows}, affine.Params(), config)
    assert len(cuda.BUILT) == len(set(threads)) == 2 and threading.current_thread() not in threads


def test_there_is_none_without_a_gpu():
    assert not cuda.available(torch.device("cpu"))


def test_tiles_have_room():
    for n in (34816, 5120, 24576, 4096, 2560, 248320, 1024, 64):
        for most in (8, 16, 32, 64):
            tile = tiles.direct_rule(n, most)
            assert tile.rows == most and tiles.room(tile, tiles.slices(n))[1] <= tiles.SHARED
        assert tiles.direct_rule(n, 128) is None
    for (n, *_), row in tiles.AFFINE.items():
        for tile in row:
            if tile.form in ("direct", "wide"):
                tiles.room(tile, tiles.slices(n))
    for wrong in (Tile("wide", 64, 80, 256), Tile("direct", 16, 64, 256, parts=3), Tile("wide", 64, 320, 256, parts=2)):
        with pytest.raises(ValueError, match=r"no room|not fit"):
            tiles.room(wrong, 8)
