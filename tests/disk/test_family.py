"""The states of a real family: what comes from disk is what was kept, and goes on as a cold pass does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.engine.conftest import GOLDEN, picture_prompt, text_prompt
from tests.patience import LONG
from tfmagic.engine import families
from tfmagic.engine.cache.key import prefixes
from tfmagic.engine.cache.store import Kept, size
from tfmagic.engine.checkpoint import Checkpoint
from tfmagic.engine.prompt import PreparedImage

from .conftest import GRAIN, digest, same


@pytest.fixture(scope="module")
def tiny():
    return families.load(Checkpoint(GOLDEN), "cpu")


@pytest.fixture(scope="module")
def pictures():
    g = torch.Generator().manual_seed(3)
    patches = torch.randn(24, 96, generator=g)
    one = PreparedImage("one", "one.png", 24, 16, 0, 6, (1, 4, 6), patches, b"one" * 11)
    return one, replace(one, digest="two", patches=patches + 1, content=b"two" * 11)


def cold(model, prompt, at: int):
    """(last row's logits, the state at `at`) of a pass from row 0."""
    features = {image.start: model.tower(image.patches, image.grid) for image in prompt.images}
    logits, kept = model.prompt_pass(model.new_state(), prompt.ids, features, prompt.positions, [at])
    tensors = kept[at].named()
    return logits, Kept(at, tuple(prompt.key[:at]), tensors, size(tensors, at))


def resumed(model, prompt, kept: Kept):
    state = model.restore(kept.tensors, kept.at)
    at = kept.at
    return model.prompt_pass(state, prompt.ids[at:], {}, prompt.positions[:, at:], [])[0], state


@pytest.mark.parametrize("rows, at", [(66, 64), (300, 256)])
def test_text_resumes_from_disk_as_it_was_kept(tiny, shelf, rows, at):
    prompt = text_prompt([(7 * i) % 240 for i in range(rows)])
    logits, kept = cold(tiny, prompt, at)
    shelf.kept(kept).close(LONG)
    found = shelf.disk().find(prefixes(prompt.key[:-1], GRAIN), prompt.key)
    assert same(found, kept)
    again, state = resumed(tiny, prompt, found)
    assert torch.equal(again, logits)
    assert all(
        torch.equal(a, b) for a, b in zip(tiny.restore(found.tensors, at).named().values(), kept.tensors.values())
    )
    assert state.rows == rows


@pytest.mark.parametrize("before", [3, 60, 62])
def test_another_picture_never_resumes_a_state_on_disk(tiny, shelf, pictures, before):
    """The placeholders are equal, the pictures are not; also where the mark lies inside the picture."""
    one, other = (picture_prompt(tiny, [list(range(before)), p, list(range(80))]) for p in pictures)
    assert one.ids == other.ids and one.key != other.key
    logits, kept = cold(tiny, one, 64)
    here = shelf.kept(kept)
    assert here.find(prefixes(other.key[:-1], GRAIN), other.key) is None
    same_again = picture_prompt(tiny, [list(range(before)), pictures[0], list(range(80))])
    found = here.find(prefixes(same_again.key[:-1], GRAIN), same_again.key)
    assert same(found, kept)
    if before == 3:
        assert torch.equal(resumed(tiny, same_again, found)[0], logits)
        assert not torch.equal(cold(tiny, other, 64)[0], logits)


def test_even_under_the_other_picture_s_name_it_is_refused(tiny, shelf, pictures):
    one, other = (picture_prompt(tiny, [[1, 2, 3], p, list(range(80))]) for p in pictures)
    kept = cold(tiny, one, 64)[1]
    here = shelf.kept(kept)
    path = shelf.files()[0]
    path.rename(path.with_name(path.name.replace(digest(kept).hex(), prefixes(other.key, GRAIN)[0].hex())))
    assert here.find(prefixes(other.key[:-1], GRAIN), other.key) is None and here.counts.damaged == 1


def test_a_state_of_another_shape_is_not_taken_back(tiny, shelf):
    prompt = text_prompt(list(range(100)))
    _, kept = cold(tiny, prompt, 64)
    kept.tensors["0.S"] = kept.tensors["0.S"][:1]
    here = shelf.kept(kept)
    found = here.find(prefixes(prompt.key[:-1], GRAIN), prompt.key)
    with pytest.raises(ValueError):
        tiny.restore(found.tensors, found.at)
    here.forget(digest(found), found)
    assert here.find(prefixes(prompt.key[:-1], GRAIN), prompt.key) is None and "does not take it" in shelf.lines[-1]
