"""Random schedules: whatever arrives when, is cut where, drafted, packed, resumed, settled, evicted, cancelled or
restarted, every stream says what it says cold, alone and undrafted, and every state that is kept is the cold one."""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from dataclasses import replace

import pytest

from tests.patience import LONG
from tfmagic.engine.cache.disk import Disk, Limits
from tfmagic.engine.cache.segments import memory
from tfmagic.engine.cache.store import Store
from tfmagic.run import Run, Token

from .conftest import GREEDY, SEEDED, Bench, letter, picture_prompt
from .drafters import BAD, BROKEN, GOOD, Clock, Drafter, Fixed
from .test_loop import ids

LONGEST = 12
"""Tokens of a reply."""
BETWEEN = ids(45, 50)
"""What stands between a reply and the next turn."""
MUST_HAPPEN = (
    "accepted", "rejected", "cached", "settled", "cancelled", "restarts", "evicted", "packed", "failed",
    "copy", "tree", "block", "none", "branches", "mixed", "cut", "ended in a draft", "stopped by a string", "logprobs",
    "drafters that failed",
)  # fmt: skip
SELDOM = "cancelled in a draft"
"""Once in some hundred schedules."""
STEEP, FLAT = Fixed({1: {1: 1.0, 16: 9.0}}), Fixed({1: {1: 9.0, 16: 9.1}})
"""Rounds whose rows are dear, and rounds whose rows are cheap."""


def fingerprint(tensors) -> bytes:
    """Of a whole state, every tensor's name, shape and bytes."""
    seen = hashlib.sha256()
    for name in sorted(tensors):
        seen.update(f"{name} {tuple(tensors[name].shape)}".encode() + memory(tensors[name].contiguous()))
    return seen.digest()


class World:
    """Conversations that share beginnings, with edits of earlier turns; and what each gives cold, alone, undrafted."""

    drafts, curves, longest = ("on", "tree", "block", "copy", "off"), (None, None, STEEP, FLAT), LONGEST

    def __init__(self, model, pictures):
        self.model, self.replies, self.states = model, {}, {}
        self.prompts, self.histories, self.known = [], {}, []
        one, two = pictures
        system = ids(75, 99)
        turns = [
            [[ids(40, 1)], [ids(30, 2)], [ids(61, 3)]],
            [[ids(12, 4), one], [ids(20, 5), two, ids(3, 6)], [ids(4, 7)]],
            [[one, ids(9, 8)], [one, two, ids(70, 9)]],
            [[ids(118, 10)], [two, ids(2, 11)]],
        ]
        for number, conversation in enumerate(turns):
            parts = [system] if number % 2 else []
            for turn in conversation:
                parts = [*parts, *turn, [241]]
                self._add(parts)
                self._add(self._edited(parts))
                parts = [*parts, self.words(self._add(parts)), BETWEEN]
        for rows in (1, 63, 64, 65, 127, 128, 129, 192, 193):
            self._add([(system + ids(200, 12))[:rows]])

    def _add(self, parts) -> int:
        prompt = picture_prompt(self.model, parts)
        if prompt.key not in [other.key for other in self.prompts]:
            self.prompts.append(prompt)
            self.known.append(prompt)
        number = next(i for i, other in enumerate(self.prompts) if other.key == prompt.key)
        self.histories.setdefault(number, parts)
        return number

    def _edited(self, parts) -> list:
        """An earlier text with another token in its middle; a picture in its stead where there is none."""
        at = next(i for i, part in enumerate(parts) if isinstance(part, list))
        text = [*parts[at]]
        text[len(text) // 2] = (text[len(text) // 2] + 1) % 240
        return [*parts[:at], text, *parts[at + 1 :]]

    def words(self, number: int) -> list[int]:
        """The greedy reply as it comes back in the next turn's prompt: as text, so without the image placeholder."""
        return [id for id in self.reply(number, GREEDY) if id < 240]

    def follows(self, later: int, earlier: int) -> bool:
        begun = [*self.prompts[earlier].key, *self.words(earlier)]
        return self.prompts[later].key[: len(begun)] == begun

    def settled(self, number: int):
        """The conversation with its greedy reply, as it is settled."""
        prompt = picture_prompt(self.model, [*self.histories[number], self.words(number), BETWEEN])
        self.known.append(prompt)
        return prompt

    def drafter(self, ways, seed: int):
        """One for a schedule."""
        return Drafter(ways, seed)

    def reply(self, number: int, sampling) -> list[int]:
        return [token.id for token in self.tokens(number, sampling)]

    def tokens(self, number: int, sampling) -> list[Token]:
        """The whole reply with its log probabilities."""
        plain = replace(sampling, draft="off", max_tokens=self.longest, stop=[], logprobs=2)
        name = (number, plain.temperature, plain.seed if plain.temperature else None)
        if name not in self.replies:
            self.replies[name] = Bench(self.model, budget=0).run(self.prompts[number], plain).streams[0].tokens
        return self.replies[name]

    def state(self, key: tuple[int, ...]) -> bytes:
        """The fingerprint of the state that one cold pass over exactly these rows leaves."""
        if key not in self.states:
            prompt = next(p for p in self.known if tuple(p.key[: len(key)]) == key)
            rows, state, model = len(key), self.model.new_state(), self.model
            images = [image for image in prompt.images if image.start < rows]
            features = {image.start: model.tower(image.patches, image.grid) for image in images}
            model.prompt_pass(state, prompt.ids[:rows], features, prompt.positions[:, :rows], [])
            self.states[key] = fingerprint(state.named())
        return self.states[key]


class Watched(Store):
    """Notes every state that comes in, even if it does not stay."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen: list[tuple[tuple[int, ...], bytes]] = []

    def _add(self, digest, kept, *args, **kwargs):
        self.seen.append((kept.key, fingerprint(kept.tensors)))
        super()._add(digest, kept, *args, **kwargs)


class Trickster:
    """A drafter that is right, nearly right, wrong all along, or tempts the reply to end."""

    rng = random.Random(0)
    known: list[list[int]] = []

    def __init__(self, ids):
        self.ids = ids

    def propose(self, limit):
        here, rng = len(self.ids), self.rng
        right = next((full[here : here + limit] for full in self.known if full[:here] == self.ids), [])
        way = rng.choice(["right", "right", "late", "early", "noise", "stop", "none"])
        if way == "late" and right:
            return [*right[:-1], (right[-1] + 1) % 240]
        if way == "early" and right:
            return [(right[0] + 1) % 240, *right[1:]]
        if way == "noise":
            return [rng.randrange(256) for _ in range(limit)]
        if way == "stop":
            return [*right[: limit // 2], *[250] * (limit - len(right[: limit // 2]))]
        return [] if way == "none" else right

    def near(self) -> bool:
        return self.rng.random() < 0.5


class Play:
    """One schedule."""

    def __init__(self, world: World, monkeypatch, tmp_path, seed: int):
        self.world, self.rng, self.seed, self.counts = world, random.Random(seed), seed, Counter()
        self.base, self.patch = tmp_path / f"states-{seed}", monkeypatch
        rng = self.rng
        monkeypatch.setattr("tfmagic.engine.scheduler.SLICE", 64 * rng.choice([1, 2, 3, 8]))
        monkeypatch.setattr("tfmagic.engine.scheduler.SLICE_BESIDE", 64 * rng.choice([1, 2, 4]))
        monkeypatch.setattr("tfmagic.engine.cache.store.SPARSE", 64 * rng.choice([1, 2, 16]))
        monkeypatch.setattr(world.model, "packed", rng.choice([64, 200, 512, 4096]))
        monkeypatch.setattr("tfmagic.engine.drafting.copy.Copier", Trickster)
        monkeypatch.setattr(Trickster, "rng", random.Random(seed))
        monkeypatch.setattr(Trickster, "known", [])
        self.budget = rng.choice([0, 300_000, 300_000, 1 << 30, 1 << 30])
        self.drafter = None
        if rng.random() < 0.8:
            ways = rng.choice([GOOD, GOOD, BAD, GOOD + BAD, [*GOOD * 3, *BAD * 3, *BROKEN]])
            self.drafter = world.drafter(ways, seed)
            clock = Clock()
            clock.slow(self.drafter, 0.0005)
            monkeypatch.setattr("tfmagic.engine.drafting.drafting.time", clock)
        self.curve = rng.choice(world.curves)
        self.durable = rng.random() < 0.2
        at = rng.randrange(len(world.prompts))
        self.topic = [*range(at, min(at + 4, len(world.prompts))), rng.randrange(len(world.prompts))]
        self.store = self.new_store()
        self.bench = Bench(world.model, store=self.store, drafter=self.drafter, curve=self.curve)
        self.asked: list[tuple[Run, object, list[list[Token]]]] = []
        self.cancelled, self.lost, self.stores = set(), set(), [self.store]
        self._watch_packs()

    def new_store(self) -> Watched:
        store = Watched(self.budget, self.world.model.grain)
        if self.durable:
            facts, limits = {"model": "tiny"}, Limits(free=0)
            store.disk = Disk(self.base, facts, self.world.model.grain, limits, lambda line: None)
        return store

    def _watch_packs(self) -> None:
        passes = type(self.world.model).prompt_passes

        def counted(parts):
            self.counts["packed"] += len(parts) > 1
            return passes(self.world.model, parts)

        self.patch.setattr(self.world.model, "prompt_passes", counted, raising=False)
        round = type(self.world.model).round

        def watched(states, windows, draws):
            shapes = {"one row" if len(window.ids) == 1 else window.chain for window in windows}
            self.counts["mixed"] += len(shapes) > 2
            return round(self.world.model, states, windows, draws)

        self.patch.setattr(self.world.model, "round", watched, raising=False)

    def submit(self) -> None:
        rng, world = self.rng, self.world
        number, streams = rng.choice(self.topic), rng.choice([1] * 8 + [2, 2, 3, 16])
        prompt = world.prompts[number]
        marks = sorted(rng.sample(range(len(prompt.ids)), min(len(prompt.ids), rng.choice([0, 0, 1, 2]))))
        draft = rng.choice(world.drafts)
        sampling = replace(rng.choice([GREEDY, SEEDED]), seed=rng.randrange(2), draft=draft)
        sampling = replace(sampling, max_tokens=rng.choice([1, 2, 9, world.longest]), logprobs=rng.choice([0, 0, 0, 2]))
        expected = [world.tokens(number, replace(sampling, seed=sampling.seed + i)) for i in range(streams)]
        known = [prompt.ids + [token.id for token in reply] for reply in expected]
        Trickster.known.extend(known)
        if self.drafter is not None:
            self.drafter.knows(known)
        if rng.random() < 0.3 and len(expected[0]) > 4:
            at = rng.randrange(1, len(expected[0]) - 1)
            sampling = replace(sampling, stop=[letter(expected[0][at].id) + letter(expected[0][at + 1].id)])
        run = self.bench.submit(replace(prompt, marks=marks), sampling, streams, cache=rng.random() < 0.95)
        self.asked.append((run, sampling, expected))
        if rng.random() < 0.4:
            self.bench.engine.settle(world.settled(number), f"run {run.id}")
            following = [n for n in range(number + 1, len(world.prompts)) if world.follows(n, number)]
            self.topic += following[:1] * 9

    def disturb(self) -> None:
        rng, store = self.rng, self.store
        for _ in range(rng.choice([0, 0, 1, 3, 9, 60])):
            self.bench.engine.step()
        if rng.random() < 0.2:
            victim = rng.choice(self.asked)[0]
            if not victim.finished:
                self.cancelled.add(victim.id)
                self.counts["cancelled in a draft"] += any(r.drafted for s in victim.streams for r in s.rounds)
            self.bench.engine.cancel(victim.id)
        if len(store) and rng.random() < 0.2:
            store._evict((), "")
        if len(store) and not self.durable and rng.random() < 0.15:  # damaged: it will not restore
            kept = rng.choice(list(store._kept.values()))
            kept.tensors["0.S"].unsqueeze_(0)
        if rng.random() < 0.1:
            self.restart()

    def restart(self) -> None:
        """The process is gone, and with it what ran; the new one has an empty memory and what is on disk."""
        self.counts["restarts"] += 1
        self.lost |= {run.id for run, _, _ in self.asked if not run.finished}
        self.close()
        self.store = self.new_store()
        self.stores.append(self.store)
        fresh = Bench(self.world.model, store=self.store, drafter=self.drafter, curve=self.curve)
        fresh.runs, fresh.events, fresh.numbers = self.bench.runs, self.bench.events, self.bench.numbers
        self.bench = fresh

    def close(self) -> None:
        if self.store.disk is not None:
            self.store.disk.close(LONG)

    def play(self) -> Counter:
        for _ in range(self.rng.randint(3, 9)):
            self.submit()
            self.disturb()
        self.bench.drain()
        self.close()
        for run, sampling, expected in self.asked:
            self.check(run, sampling, expected)
        for store in self.stores:
            assert store.bytes <= store.budget and store.bytes == charged(store)
            for key, found in store.seen:
                assert found == self.world.state(key), (self.seed, len(key))
            self.counts["evicted"] += store.counts.evicted
            self.counts["failed"] += store.counts.failed
            self.counts["states"] += len(store.seen)
        return self.counts

    def check(self, run: Run, sampling, expected) -> None:
        cut = run.id in self.cancelled or run.id in self.lost
        if run.id not in self.lost:
            assert run.status == ("stopped" if run.id in self.cancelled else "done"), (self.seed, run.error)
        for stream, reply in zip(run.streams, expected):
            whole, text = told(reply[: sampling.max_tokens], sampling.stop)
            self.check_tokens(run, stream.tokens, whole[: len(stream.tokens)] if cut else whole, sampling)
            so_far = text_of(whole[: len(stream.tokens)])  # what may have begun a stop string is shown at the end
            alike = stream.text == text or (cut and (text.startswith(stream.text) or stream.text == so_far))
            assert alike, (self.seed, run.id)
            self.counts["stopped by a string"] += stream.finish_reason == "stop" and stream.text != text_of(whole)
            for r in stream.rounds:
                self.counts[r.draft_source] += 1
                self.counts["cut"] += r.cut
                self.counts["ended in a draft"] += r.accepted > 0 and r.committed <= r.accepted
                seen = Counter()
                for node in r.nodes:
                    self.counts["branches"] += node.accepted and seen[node.parent] > 0
                    seen[node.parent] += 1
        stats = run.stats
        self.counts["accepted"] += stats["accepted"]
        self.counts["rejected"] += stats["drafted"] - stats["accepted"]
        self.counts["cached"] += run.cached_tokens or 0
        self.counts["disk"] += run.cache_source == "disk"
        self.counts["settled"] += run.settled
        self.counts["cancelled"] += run.id in self.cancelled

    def check_tokens(self, run: Run, tokens: list[Token], whole: list[Token], sampling) -> None:
        assert [token.id for token in tokens] == [token.id for token in whole], (self.seed, run.id)
        if sampling.logprobs:
            self.counts["logprobs"] += any(token.made == "draft" for token in tokens)
            assert [(t.logprob, t.top) for t in tokens] == [(t.logprob, t.top) for t in whole], (self.seed, run.id)


def charged(store: Store) -> int:
    """Bytes of all states, by the tensors themselves."""
    kept = store._kept.values()
    tensors = {id(x): x.nbytes for one in kept for x in dict.values(one.tensors)}
    return sum(tensors.values()) + sum(40 * one.at for one in kept)


def text_of(tokens: list[Token]) -> str:
    return "".join(letter(token.id) for token in tokens)


def told(tokens: list[Token], stop: list[str]) -> tuple[list[Token], str]:
    """What a reply that stops at these strings says of these tokens, and its text."""
    text = text_of(tokens)
    at = min((text.find(one) for one in stop if one in text), default=None)
    return (tokens, text) if at is None else (tokens[: at + len(stop[0])], text[:at])


@pytest.fixture(scope="module")
def world(tiny, pictures):
    return World(tiny, pictures)


def many(world, tmp_path, seeds, capfd) -> Counter:
    counts = Counter()
    try:
        for seed in seeds:
            with pytest.MonkeyPatch.context() as patch:
                counts += Play(world, patch, tmp_path, seed).play()
    finally:
        world.model.tap([])
    counts["drafters that failed"] = capfd.readouterr().err.count("the drafter failed")
    return counts


@pytest.mark.timeout(900)
def test_schedules(world, tmp_path, capfd):
    counts = many(world, tmp_path, (*range(24), 36, 37, 39), capfd)  # the last ones: what the others seldom do
    assert all(counts[what] for what in (*MUST_HAPPEN, SELDOM)), f"every kind of thing must happen: {counts}"


@pytest.mark.long
@pytest.mark.parametrize("batch", range(20))
def test_thousands_of_schedules(world, tmp_path, capfd, batch):
    counts = many(world, tmp_path, range(1000 + 100 * batch, 1100 + 100 * batch), capfd)
    assert all(counts[what] for what in (*MUST_HAPPEN, "disk")), f"every kind of thing must happen: {counts}"
