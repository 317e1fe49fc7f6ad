from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tfmagic.engine.sampling import candidates, derived_seed, draw, fill, gumbel, likeliest
from tfmagic.errors import Refusal
from tfmagic.protocol import Params

from .conftest import GREEDY, SEEDED


def row(*values):
    return np.array(values, np.float32)


def kept(values, **cuts):
    ids, _ = candidates(np.array(values, float), replace(SEEDED, **{"top_k": 0, "top_p": 1.0, "min_p": 0.0} | cuts))
    return ids.tolist()


def test_greedy_takes_the_largest_and_the_lowest_id_of_equals():
    assert draw(row(1, 5, 5, 2), GREEDY, 0, 0) == 1


def test_ids_without_a_token_are_never_drawn():
    noisy = np.zeros(300, np.float32)
    noisy[270] = 50
    assert draw(noisy, replace(GREEDY, size=256), 0, 0) == 0
    free = replace(SEEDED, size=256, top_k=0, top_p=1.0)
    assert max(draw(noisy, free, 1, p) for p in range(500)) < 256


def test_candidates_are_ordered_by_value_then_id():
    assert kept([1, 3, 2, 3]) == [1, 3, 2, 0]


def test_top_k_breaks_ties_to_the_lowest_id():
    assert kept([2, 1, 2, 2, 0], top_k=2) == [0, 2]
    assert kept([0, 1, 1, 1, 3], top_k=3) == [4, 1, 2]
    assert kept([1, 2], top_k=9) == [1, 0]


def test_top_p_keeps_the_token_that_crosses_it():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert kept(logits, top_p=0.5) == [0]
    assert kept(logits, top_p=0.51) == [0, 1]
    assert kept(logits, top_p=0.81) == [0, 1, 2]
    assert kept(logits, top_p=1e-9) == [0]


def test_min_p_is_relative_to_the_likeliest():
    logits = np.log([0.5, 0.3, 0.15, 0.05])
    assert kept(logits, min_p=0.29) == [0, 1, 2]
    assert kept(logits, min_p=1.0) == [0]


def test_top_p_counts_only_what_top_k_left():
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2, top_p=0.6) == [0, 1]
    assert kept(np.log([0.4, 0.3, 0.2, 0.1]), top_k=2, top_p=0.5) == [0]


def test_a_draw_is_a_function_of_row_seed_and_place_alone():
    values = np.random.default_rng(0).normal(size=256).astype(np.float32)
    first = [draw(values, SEEDED, 5, p) for p in range(40)]
    assert [draw(values.copy(), SEEDED, 5, p) for p in reversed(range(40))] == first[::-1]
    assert [draw(values, SEEDED, 6, p) for p in range(40)] != first
    assert len(set(first)) > 5


def test_the_noise_of_a_token_does_not_depend_on_the_other_candidates():
    assert gumbel(3, 9, np.array([7, 250]))[1] == gumbel(3, 9, np.arange(256))[250]
    assert gumbel(2**63 - 1, 2**40, np.array([248319])).shape == (1,)


def test_draws_follow_the_distribution():
    p = np.array([0.5, 0.25, 0.15, 0.1])
    free = replace(SEEDED, top_k=0, top_p=1.0, size=4)
    drawn = [draw(np.log(p).astype(np.float32), free, seed, place) for seed in range(40) for place in range(500)]
    share = np.bincount(drawn, minlength=4) / len(drawn)
    assert np.abs(share - p).max() < 0.012
    cold = [draw(np.log(p).astype(np.float32), replace(free, temperature=0.5), 1, place) for place in range(4000)]
    assert abs(np.mean(np.array(cold) == 0) - 0.25 / (p**2).sum()) < 0.03


def test_noise_is_not_shared_between_neighbouring_places_seeds_or_ids():
    noise = np.stack([gumbel(s, p, np.arange(64)) for s in range(8) for p in range(8)])
    assert len(np.unique(noise)) == noise.size
    assert abs(np.corrcoef(noise[:-1].ravel(), noise[1:].ravel())[0, 1]) < 0.05


def test_numbers_that_are_not_finite_are_an_error():
    for bad in (np.nan, np.inf):
        with pytest.raises(FloatingPointError, match="not finite"):
            draw(row(0, bad, 1), GREEDY, 0, 0)


def test_log_probabilities_are_of_the_row_itself():
    assert likeliest(row(0.1, 0.6, 0.3), SEEDED, 0) is None
    chosen, top = likeliest(np.log(row(0.1, 0.6, 0.3)), replace(SEEDED, size=3, logprobs=2), 0)
    assert np.isclose(chosen, np.log(0.1)) and [id for id, _ in top] == [1, 2] and np.isclose(top[0][1], np.log(0.6))


GENERATION = {"do_sample": True, "temperature": 0.7, "top_p": 0.9, "top_k": 40, "eos_token_id": [5, 6]}


def filled(generation=GENERATION, context=100, rows=10, **params):
    return fill(Params(**params), generation, list(range(rows)), context, 256)


def test_defaults_come_from_the_checkpoint():
    s = filled()
    assert (s.temperature, s.top_p, s.top_k, s.min_p, s.stop_ids) == (0.7, 0.9, 40, 0.0, {5, 6})
    assert s.max_tokens == 90 and filled(context=4096).max_tokens == 512
    assert filled(GENERATION | {"do_sample": False}).greedy
    assert filled(GENERATION | {"max_new_tokens": 7, "eos_token_id": 3}).max_tokens == 7
    assert filled({}).greedy and filled({}).stop_ids == frozenset()


def test_what_is_asked_for_wins():
    s = filled(temperature=0, top_p=0.5, top_k=0, min_p=0.1, seed=9, max_tokens=3, draft="off", stop=["x"], logprobs=2)
    assert s.greedy and (s.top_p, s.top_k, s.min_p, s.seed, s.max_tokens) == (0.5, 0, 0.1, 9, 3)
    assert (s.draft, s.stop, s.logprobs) == ("off", ["x"], 2)


def test_a_reply_is_clipped_to_the_context():
    assert filled(context=12, max_tokens=50).max_tokens == 2


def test_a_seed_that_is_not_given_is_the_prompts_own():
    assert filled().seed == filled().seed == derived_seed(range(10)) != filled(rows=11).seed
    assert 0 <= derived_seed([1]) < 2**63


@pytest.mark.parametrize(
    "params, word",
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"),
        ({"temperature": 11}, "temperature"), ({"top_p": 0}, "top_p"), ({"top_p": 1.1}, "top_p"),
        ({"top_k": -1}, "top_k"), ({"min_p": 2}, "min_p"), ({"max_tokens": 0}, "max_tokens"), ({"seed": -1}, "seed"),
        ({"logprobs": 21}, "logprobs"), ({"stop": [""]}, "stop"), ({"stop": ["a"] * 17}, "stop"),
        ({"draft": "tree"}, "tree"), ({"draft": "block"}, "block"),
    ],
)  # fmt: skip
def test_values_out_of_range_are_refused_by_name(params, word):
    with pytest.raises(Refusal) as error:
        filled(**params)
    assert word in error.value.problem and error.value.fix


def test_a_prompt_that_leaves_no_room_is_refused_with_the_numbers():
    with pytest.raises(Refusal, match=r"100 tokens.*context of 100"):
        filled(rows=100)
    assert filled(rows=99).max_tokens == 1
