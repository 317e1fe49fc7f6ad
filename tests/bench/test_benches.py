"""What the benches for a GPU are made of, where there is none."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tests.bench import checkpoints, kernels, suite, tiles, within
from tests.bench.chosen import Chosen
from tests.bench.drafter import Made
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting.block import Ask
from tfmagic.kernels.gpu.tiles import Tile

TINY = checkpoints.SIZES["tiny"]


@pytest.mark.parametrize("bits", [None, 4])
def test_drawn_weights_are_the_written_ones(bits, tmp_path):
    checkpoints.write(tmp_path / "written", TINY, bits)
    (tmp_path / "drawn").mkdir()
    written = Checkpoint(tmp_path / "written").tensors()
    checkpoint = checkpoints.Drawn(tmp_path / "drawn", TINY, bits)
    drawn = checkpoint.tensors("cpu")
    assert checkpoint.config == Checkpoint(tmp_path / "written").config
    for plan in checkpoints.planned(TINY):
        one, other = (tensors.take(plan.name, plan.shape).float() for tensors in (drawn, written))
        assert torch.allclose(one, other, atol=2**-8), plan.name  # MLX's norms have 1 added in bf16
        assert drawn.form(plan.name) == written.form(plan.name)
        if drawn.form(plan.name):
            packed = [tensors.affine(plan.name, plan.shape) for tensors in (drawn, written)]
            assert all(torch.equal(*(getattr(x, part) for x in packed)) for part in ("q", "scales", "biases"))
    assert drawn.leftover() == []


@pytest.mark.parametrize("rate", [0.0, 0.7, 1.0])
def test_a_chosen_part_of_the_guesses_is_right(rate):
    made = Made("tiny", "cpu", 16)
    chosen = Chosen(made, made, "cpu", 50)
    knows = [[3, 4, *[(7 * i * i + s) % 50 for i in range(300)]] for s in range(4)]
    chosen.knows(knows)
    chosen.begin(rate)
    contexts, right, tried = [chosen.context() for _ in knows], 0, 0
    for at in range(2, 280, 9):
        for context in contexts:
            chosen.extend(context, torch.zeros(9, 2 * 128), at - 9)
        asks = [Ask(context, known[at], at, 7) for context, known in zip(contexts, knows)]
        for known, lattice in zip(knows, chosen.lattices(asks)):
            for place, ids in enumerate(lattice.ids, at + 1):
                right, tried = right + (ids[0] == known[place]), tried + 1
                assert known[place] not in ids[1:] and len(set(ids)) == 16 and 0 <= ids.min() <= ids.max() < 50
            assert lattice.logits[:, 0].min() > lattice.logits[:, 1:].max() and not lattice.edges.any()
    assert abs(right / tried - rate) < 0.04


@pytest.mark.slow
def test_the_bench_of_a_gpu_runs_on_a_cpu():
    command = [
        *(sys.executable, "-m", "tests.bench.gpu", "--model", "tiny", "--bits", "4", "--kv", "fp8", "--device", "cpu"),
        *("--tokens", "4", "--repeats", "1", "--rates", "0,0.9"),
        *("--parts", "ttft,again,keeping,prefill,copies,drafts,logprobs"),
    ]
    done = subprocess.run(command, cwd=suite.ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    rows = [line for line in done.stdout.splitlines() if line.startswith("| tiny, 4 bits, kv fp8 | ")]
    ttft, drafts = ("TTFT cold, 1024 tokens", "1024 kept + 128 new"), ("copying", "16 streams, 90 % right")
    for what in (*ttft, "keeps its states", "prefill", "likeliest", *drafts):
        assert any(what in row for row in rows), what
    assert all(row.count("|") == 5 for row in rows) and "OTHER TOKENS" not in done.stdout


class Imagined:
    """Rounds whose time is that of the first place's tiles: less with an early launch, still less with 64 lines."""

    def __init__(self, table):
        self.table, self.tried = table, 0

    def ms(self, streams: int, rows: int) -> float:
        self.tried += 1
        return sum(3.0 - tile.early - (tile.ahead == 64) for (tile, *_) in self.table.values())


def test_what_makes_a_round_shorter_stays():
    plain = Tile("stream", 16, 32, 128)
    table = {(4096, 4096): (plain,) * 8, (4096, 12288): (plain,) * 8, (9, 9): (plain,) * 8}
    rounds = Imagined(table)
    within.tune(rounds, table, [(4096, 4096), (4096, 12288)], 16, float("inf"))
    for key in ((4096, 4096), (4096, 12288)):
        assert table[key][0].early and table[key][0].ahead == 64 and table[key][1:] == (plain,) * 7
    assert table[9, 9] == (plain,) * 8 and rounds.tried > 10
    within.tune(rounds, table, [(9, 9)], 16, 0.0)  # no time is left
    assert table[9, 9] == (plain,) * 8


def test_a_tile_is_written_as_it_is_read():
    direct = Tile("direct", 16, 80, 256, early=True, parts=2)
    assert tiles.source(direct) == 'Tile("direct", 16, 80, 256, early=True, parts=2)'
    halves, ahead = Tile("tall", 128, 256, 64, 8, 3, halves=True), Tile("stream", 8, 64, 128, early=True, ahead=4)
    for tile in (halves, ahead, direct):
        assert eval(tiles.source(tile), {"Tile": Tile}) == tile


def test_a_profile_counts_gaps_and_what_hides_behind_nothing():
    def event(ts, dur, name, grid=None, cat="kernel"):
        return {"cat": cat, "ts": ts, "dur": dur, "name": name, "args": {} if grid is None else {"grid": grid}}

    one = [event(0, 10, "product<int>(x)", [8, 1, 1]), event(4, 2, "norm", [1, 1, 1]), event(13, 5, "norm", [1, 1, 1])]
    again = [event(1000 + e["ts"], e["dur"], e["name"], e["args"]["grid"]) for e in one]
    found = kernels.summed([event(0, 900, "launch", cat="cpu_op"), *again, *one], 2)
    assert found == [("product 8", 1, 10), ("norm ", 2, 4)]  # 0 behind the product, and 3 + 5
    assert kernels.total(found) == 0.018 and "0.018 ms  in all" in kernels.table(found)
