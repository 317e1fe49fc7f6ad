"""The drafter's recipe: what it learns from, the mask rule, export, and that it learns."""

import gzip
import json
import random
import types

import numpy as np
import pytest
import torch

from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.drafting import block
from tfmagic.engine.embedded import conversation
from tfmagic.engine.embedded.conversation import Layout, Talker
from tfmagic.engine.embedded.drafter import data, evaluate, export, net, train
from tfmagic.engine.embedded.tokenizer import ID, Encoder
from tfmagic.engine.embedded.words import Words

from .test_recipe import CORPUS

pytestmark = pytest.mark.slow
CONFIG = net.CONFIG
TAPS = CONFIG["dflash_config"]["target_layer_ids"]
BLOCK = CONFIG["block_size"]
LENGTH = 160


@pytest.fixture(scope="module")
def target():
    return data.Target(TAPS)


@pytest.fixture(scope="module")
def source(corpus):
    return data.Source(corpus, Layout(4, LENGTH), voices=4)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "corpus.json.gz"
    with gzip.open(path, "wt") as file:
        json.dump(CORPUS, file)
    return path


@pytest.fixture(scope="module")
def rows(source, target):
    return source.fresh(target)


@pytest.fixture(scope="module")
def drafter(target):
    """Random weights, no part of them without effect."""
    draw = torch.Generator().manual_seed(3)
    weights = net.initial(target.final_scale)
    for name, tensor in weights.items():
        if "codebook" in name or "kernel" in name:
            tensor += 0.1 * torch.randn(tensor.shape, generator=draw)
    return net.Drafter(weights, target.embedding)


# Data -----------------------------------------------------------------------------------------------


def test_labels_are_the_targets_own_tokens(rows):
    """Where the generator's answers are right, and most are, the labels are the next ids."""
    answer = rows.labels >= 0
    assert torch.equal(answer, rows.kinds > 0) and 100 < answer.sum() < answer.numel() / 2
    assert (rows.labels[:, :-1] == rows.ids[:, 1:])[answer[:, :-1]].float().mean() > 0.8
    assert rows.taps.shape == (4, LENGTH, len(TAPS) * CONFIG["hidden_size"])


def test_what_the_target_speaks_greedily_is_what_it_reads(source, target):
    """Row by row with kept states = one teacher-forced pass: prompts as given, answers the argmax."""
    talks = []
    while len(talks) < 3:
        talks += data.scripts(source.batch())
    talks = [script[:2] for script in talks[:3]]
    ids, answers = target.speak(talks, LENGTH, temperature=0.0)
    read = target.read(ids, torch.arange(LENGTH).expand(3, 3, -1), answers)
    spot = (answers > 0)[:, :-1]
    assert spot.sum() > 30 and torch.equal(read.labels[:, :-1][spot], ids[:, 1:][spot])
    for row, script in zip(ids.tolist(), talks):
        assert row[: len(script[0][0])] == script[0][0]
        ends = [i for i, id in enumerate(row) if id == ID["<|im_end|>"]]
        assert len(ends) >= 2  # the question's and the answer's


def test_spoken_conversations_are_labelled_by_what_was_said(source, target):
    torch.manual_seed(0)
    rows = source.speak(target)
    spot = rows.labels >= 0
    assert torch.equal(rows.labels[:, :-1][spot[:, :-1]], rows.ids[:, 1:][spot[:, :-1]]) and not spot[:, -1].any()


def test_scripts_hold_the_prompts(corpus):
    """A conversation's prompts and answers, put together again, are the conversation."""
    encoder = Encoder()
    talker, draw = Talker(encoder, Words(CORPUS, encoder.pieces())), random.Random(4)
    layout = Layout(6, 320)
    arrays = layout.views(memoryview(bytearray(layout.offsets()[1])))
    made = [talker.row(draw, 320, text_only=i % 2 == 0) for i in range(6)]
    conversation.fill(arrays, layout, talker, draw, made)
    found = data.scripts({name: torch.from_numpy(a) for name, a in arrays.items()})
    assert len(found) == 3
    for script, row in zip(found, made[::2]):
        assert [kind for _, kind in script] == [kind for kind, _, _ in row.spans]
        whole = []
        for (prompt, _), (_, start, end) in zip(script, row.spans):
            whole += prompt + row.ids[start:end]
        assert whole == row.ids[: row.spans[-1][2]]


def test_blocks_and_anchors_by_brute_force():
    """Random texts and labels: an anchor is the target's own token with more to come; a draft's label counts while
    every token before it is the target's own."""
    draw = np.random.default_rng(1)
    ids, labels = draw.integers(0, 3, (5, 40)), draw.integers(-1, 3, (5, 40))
    labels[:, -1] = -1
    rows = data.Rows(*map(torch.from_numpy, (ids, labels, labels)), torch.zeros(5, 40, 1))
    at = torch.arange(40).expand(5, -1)
    found, valid = data.blocks(rows, at, BLOCK)
    able = data.anchors(rows)
    for n in range(5):
        for a in range(40):
            assert able[n, a] == (a > 0 and labels[n, a - 1] == ids[n, a] and labels[n, a] >= 0)
            good = True
            for k in range(BLOCK - 1):
                row = a + k
                good = good and row < 39 and labels[n, row] >= 0
                assert valid[n, a, k] == good
                if good:
                    assert found[n, a, k] == labels[n, row]
                    good = labels[n, row] == ids[n, row + 1]


def test_choose_takes_anchors_first(rows):
    at, real = data.choose(rows, 30)
    able = data.anchors(rows)
    for n in range(4):
        chosen = at[n][real[n]].tolist()
        assert len(set(chosen)) == len(chosen) == min(30, int(able[n].sum())) and able[n, chosen].all()


# Net ------------------------------------------------------------------------------------------------


def test_a_block_sees_the_rows_before_its_anchor_and_itself(drafter, rows):
    """Against one anchor alone over a context cut before it; and nothing at or behind the anchor matters."""
    at = torch.tensor([[60, 90, 61], [70, 100, 120], [50, 80, 81], [66, 67, 68]])
    together = drafter.hidden(rows, at)
    for n in range(4):
        for i, a in enumerate(at[n].tolist()):
            cut = data.Rows(*(part[n : n + 1, : a + 1].clone() for part in rows))
            cut.taps[:, a] = torch.nan  # the anchor's own row: never read, not even times zero
            cut = cut._replace(taps=cut.taps[:, :a])
            alone = drafter.hidden(cut, torch.tensor([[a]]))[0, 0]
            torch.testing.assert_close(together[n, i], alone, rtol=1e-4, atol=1e-4)
    changed = rows._replace(taps=rows.taps.clone())
    changed.taps[0, 60:] += 1
    assert torch.equal(drafter.hidden(changed, at)[0, 0], together[0, 0])
    changed.taps[0, 59] += 1
    assert not torch.equal(drafter.hidden(changed, at)[0, 0], together[0, 0])


def test_export_and_reload_through_the_engine_give_the_same_drafts(drafter, target, rows, tmp_path):
    """The engine's own reader of drafters, on the exported folder: same candidates, logits, edges, chains."""
    export.save(tmp_path, drafter.weights)
    assert (tmp_path / "model.safetensors").stat().st_size < 10e6
    held = {name: tensor.to(torch.bfloat16).float() for name, tensor in drafter.weights.items()}
    ours = net.Drafter(held, target.embedding)
    depth, head = CONFIG["num_target_layers"], lambda rows: rows @ target.embedding.t()
    model = types.SimpleNamespace(embedding=lambda: target.embedding, head=lambda size: head, depth=depth)
    theirs = block.Drafter(Checkpoint(tmp_path), model)
    assert theirs.layers == TAPS and theirs.block == BLOCK
    places = [(0, 60), (0, 90), (2, 33)]
    asks = []
    for n, a in places:
        context = theirs.context()
        theirs.extend(context, rows.taps[n, : a // 2], 0)
        theirs.extend(context, rows.taps[n, a // 2 : a], a // 2)
        asks.append(block.Ask(context, int(rows.ids[n, a]), a, BLOCK - 1))
    for (n, a), lattice in zip(places, theirs.lattices(asks)):
        row, at = rows.take(slice(n, n + 1)), torch.tensor([[a]])
        h, logits = ours.predict(ours.hidden(row, at)[:, :, 1:])
        top = logits[0, 0].topk(16, -1)
        np.testing.assert_allclose(lattice.logits, top.values.numpy(), rtol=1e-3, atol=1e-3)
        assert (lattice.ids == top.indices.numpy()).mean() > 0.98  # but for near ties
        chain, behind, walked = ours.draft(row, at)[0, 0].tolist(), 0, []
        for k in range(BLOCK - 1):
            before = torch.tensor([[int(rows.ids[n, a])]]) if k == 0 else torch.from_numpy(lattice.ids[None, k - 1])
            for i, id in enumerate(before[0]):
                candidates, own = (torch.from_numpy(x[None, None, k]) for x in (lattice.ids, lattice.logits))
                scores = ours.rescore(h[:, :, k], own, candidates, id.view(1, 1))[0, 0]
                expected = scores.numpy() - lattice.logits[k]
                np.testing.assert_allclose(lattice.edges[k, i], expected, rtol=1e-3, atol=1e-3)
            behind = int((lattice.logits[k] + lattice.edges[k, behind]).argmax())
            walked.append(int(lattice.ids[k, behind]))
        assert walked == chain


def test_table_counts_rounds_along_an_answer():
    """A drafter that is always right for two places, then wrong: three tokens a round."""
    ids = torch.arange(40)[None]
    labels = torch.full((1, 40), -1)
    labels[0, 9:30] = ids[0, 10:31]  # an answer of 21 tokens: rows 10 to 30
    rows = data.Rows(ids, labels, (labels >= 0).long(), torch.zeros(1, 40, 1))
    right = types.SimpleNamespace(block=BLOCK)
    right.draft = lambda rows, at: torch.stack([at[..., None] + k for k in range(1, BLOCK)], -1)[..., 0, :].where(
        torch.arange(BLOCK - 1) < 2, -5
    )
    assert evaluate.table(right, rows)["ALL"] == (3.0, 7)  # from row 10: 10, 13, 16, 19, 22, 25, 28


# Training -------------------------------------------------------------------------------------------


def test_thirty_steps_lower_the_loss(target, rows):
    weights = {name: t.requires_grad_() for name, t in net.initial(target.final_scale).items()}
    drafter, adam = net.Drafter(weights, target.embedding), torch.optim.Adam(weights.values(), 2e-3)
    draw, losses = torch.Generator().manual_seed(5), []
    for _ in range(30):
        at, real = data.choose(rows, 6, draw)
        loss, measures = drafter.loss(rows, at, real, *data.blocks(rows, at, BLOCK))
        adam.zero_grad()
        loss.backward()
        adam.step()
        losses.append(float(measures[0]))
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert all(weight.grad.abs().sum() > 0 for weight in weights.values())


def test_training_goes_on_from_its_state_and_can_be_exported(corpus, tmp_path):
    options = f"--out {tmp_path} --corpus {corpus} --rows 2 --anchors 8 --length 192 --pool 8 --reuse 60 --workers 0"
    options += " --spoken 0 --exam-rows 0 --seconds 600"
    trainer = train.Trainer(train.parse([*options.split(), "--steps", "2"]))
    trainer.train()
    again = train.Trainer(train.parse([*options.split(), "--resume"]))
    assert again.step_number == 2 and 0 < again.before < 600
    assert torch.equal(again.average, trainer.average) and torch.equal(again.store.flat, trainer.store.flat)
    weights, box = export.averaged(tmp_path)
    assert set(weights) == set(net.initial(trainer.target.final_scale)) and box["step"] == 2
    export.save(tmp_path / "folder", weights)
    export.write_card(tmp_path / "folder", weights, box)
    card = tmp_path / "folder" / "README.md"
    evaluate.write_scores(card, "| a | b |")
    assert "| a | b |" in card.read_text() and "Not measured" not in card.read_text()
    assert "## How it was made" in card.read_text() and " 2 steps" in card.read_text()
