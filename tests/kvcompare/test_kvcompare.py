"""The comparison of fp8 keys and values with the ordinary ones: its arithmetic, its table, and a run of either form."""

from __future__ import annotations

import math

import pytest
import torch

from tests.bench import checkpoints
from tfmagic import cli
from tfmagic.engine import families, kvcompare
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.kvcompare import Bucket, Row, buckets, compare, row, table
from tfmagic.engine.prompt import TextSide
from tfmagic.errors import Refusal


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny random model with a tokenizer."""
    path = tmp_path_factory.mktemp("kv") / "tiny"
    checkpoints.write(path, checkpoints.SIZES["tiny"])
    return path


def test_a_row_is_compared_by_hand():
    a = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.5, 0.3]]))
    b = torch.log(torch.tensor([[0.25, 0.5, 0.25], [0.2, 0.5, 0.3]])) + 3
    found = row(a, b, [2, 0])
    assert found.agree.tolist() == [False, True]
    assert found.kl.tolist() == pytest.approx([0.25 * math.log(2), 0], abs=1e-6)
    assert found.loss.tolist() == pytest.approx([math.log(4), math.log(5)], abs=1e-6)
    assert found.loss_fp8.tolist() == pytest.approx([math.log(4), math.log(5)], abs=1e-6)
    assert len(row(a, b, [1]).kl) == 1


def test_rows_fall_into_buckets_by_position():
    n = 300
    kl = torch.arange(n).double()
    found = buckets(Row(torch.arange(n) % 2 == 0, kl, kl + 1, kl + 2))
    assert [(b.first, b.last, b.rows) for b in found] == [(0, 63, 64), (64, 255, 192), (256, 299, 44)]
    assert found[0].agreement == 0.5 and found[0].kl == 31.5 and found[2].worst == 299
    assert (found[0].loss, found[0].loss_fp8) == (32.5, 33.5)


def test_the_table_sums_up():
    lines = table([Bucket(0, 63, 64, 1.0, 0.0, 0.5, 1.0, 2.0), Bucket(64, 95, 32, 0.25, 3.0, 9.0, 4.0, 2.0)])
    assert len(lines) == 4 and len({len(line) for line in lines}) == 1
    assert lines[-1].split() == ["all", "96", "75.00%", "1.00e+00", "9.00e+00", "2.0000", "2.0000"]


@pytest.mark.parametrize("form", ["exact", "bf16"])
def test_a_model_is_compared(folder, form, monkeypatch):
    monkeypatch.setattr(kvcompare, "SLICE", 64)
    said = []
    found = compare(str(folder), None, "cpu", 100, form, said.append)
    assert [(b.first, b.last) for b in found] == [(0, 63), (64, 98)]
    assert all(0 < b.kl < 0.05 and b.agreement > 0.8 for b in found), found
    assert all(abs(b.loss - math.log(5000)) < 2 for b in found)
    assert any("fp8: 64 of 99 rows" in text for text in said)


def test_it_reads_what_the_engine_reads(folder):
    """A row's distribution is the prompt pass's own, however the text was cut."""
    checkpoint = Checkpoint(folder)
    ids = kvcompare.conversations(TextSide(checkpoint), 80)[:80]
    rows, model = kvcompare.residuals(checkpoint, "cpu", None, "fp8", ids, print)
    alone = families.load(checkpoint, "cpu", kv="fp8")
    for n in (1, 40, 79):
        logits, _ = alone.prompt_pass(alone.new_state(), ids[:n], {}, alone.positions(ids[:n], [])[0], [])
        assert torch.equal(model.logits(rows[n - 1 : n])[0], logits)


def test_the_texts_are_the_same_every_time(folder):
    side = TextSide(Checkpoint(folder))
    ids = kvcompare.conversations(side, 500)
    assert len(ids) >= 500 and ids == kvcompare.conversations(side, 500)
    assert "story" in side.decode(ids)


def test_what_cannot_be_compared_is_said(folder, tmp_path, capsys):
    with pytest.raises(Refusal, match="reads 4,096 tokens at most, and the text has 4,097"):
        compare(str(folder), "a " * 9000, "cpu", 4097)
    with pytest.raises(Refusal, match="1 tokens"):
        compare(str(folder), "a", "cpu")
    (tmp_path / "bad").write_bytes(b"\xff\xfe\xff")
    for path, match in ((tmp_path / "none", "No such file"), (tmp_path / "bad", "not UTF-8")):
        with pytest.raises(Refusal, match=match):
            kvcompare.read_text(str(path))
    assert cli.main(["kvcompare", str(folder), "--text", str(tmp_path / "none")]) == 1
    assert "cannot be read" in capsys.readouterr().err


def test_the_command_prints_the_table(folder, tmp_path, capsys):
    (tmp_path / "text").write_text("A fox found a red kite. " * 20)
    words = ["kvcompare", str(folder), "--text", str(tmp_path / "text"), "--device", "cpu", "--rows", "70"]
    assert cli.main(words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("positions") and lines[-1].startswith("all") and len(lines) == 4
