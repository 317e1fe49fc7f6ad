"""How launches are captured, on a GPU that is made of rules: memory is shared with a graph that is alive."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from tfmagic.engine.families.qwen3_5.gpu.graphs import Graphs


class Card:
    """Of CUDA what capturing uses. Memory is gone with the last graph in it, and may not be asked for again."""

    def __init__(self):
        self.alive: dict[int, int] = {}
        self.made, self.replayed, self.waited = 0, [], 0
        self.capturing = None

    def graph(self):
        return Graph(self)

    def synchronize(self):
        assert self.capturing is None
        self.waited += 1


class Graph:
    def __init__(self, card: Card):
        self.card, self.launched, self.memory = card, [], None

    def capture_begin(self, pool, mode):
        assert self.card.capturing is None and mode == "thread_local"
        if pool is None:
            self.card.made += 1
            pool = self.card.made
        else:
            assert self.card.alive[pool] > 0, "shared with no graph that is alive"
        self.card.alive[pool] = self.card.alive.get(pool, 0) + 1
        self.memory, self.card.capturing = pool, self

    def capture_end(self):
        self.card.capturing = None

    def pool(self):
        return self.memory

    def replay(self):
        self.card.replayed.append(self.launched)

    def __del__(self):
        if self.memory is not None:
            self.card.alive[self.memory] -= 1


@pytest.fixture
def card(monkeypatch):
    card = Card()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "a stream")
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: card)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", card.graph)
    return card


def launch(card: Card, name: str, ran: list[str]):
    def run():
        (card.capturing.launched if card.capturing else ran).append(name)

    return run


def test_a_launch_runs_once_and_is_then_replayed(card):
    graphs, ran = Graphs(torch.device("cuda:0")), []
    one, other = (graphs.captured(launch(card, name, ran)) for name in ("one", "other"))
    other(), one(), other()
    assert ran == ["one", "other"] and card.replayed == [["other"], ["one"], ["other"]]
    assert card.made == 1 and graphs.count == card.waited == 2


def test_memory_is_shared_when_every_graph_before_is_gone(card):
    graphs, ran = Graphs(torch.device("cuda:0")), []
    made = [graphs.captured(launch(card, str(i), ran)) for i in range(3)]
    made.clear()
    graphs.captured(launch(card, "again", ran))()
    assert card.made == 1 and card.replayed == [["again"]] and card.alive[1] == 1


def test_a_capture_that_fails_is_ended_and_the_next_goes_well(card):
    graphs, ran = Graphs(torch.device("cuda:0")), []

    def fails():
        if card.capturing:
            raise RuntimeError("no")

    for _ in range(2):
        with pytest.raises(RuntimeError, match="no"):
            graphs.captured(fails)
        graphs.captured(launch(card, "well", ran))()
    assert card.replayed == [["well"], ["well"]] and card.capturing is None


def test_on_a_cpu_it_runs():
    ran = []
    graphs = Graphs(torch.device("cpu"))
    launch = graphs.captured(lambda: ran.append(1))
    assert ran == [] and graphs.count == 1
    launch()
    assert ran == [1]
