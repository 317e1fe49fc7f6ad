"""The shipped model on a GPU, opened with its drafter: the promises hold there too, in both forms, and the exact one
says what it says on the CPU."""

from __future__ import annotations

import hashlib
import io
import time

import pytest

from tfmagic import protocol
from tfmagic.engine.embedded.draw import draw
from tfmagic.engine.open import Settings
from tfmagic.engine.open import open as open_model
from tfmagic.engine.stream import Request
from tfmagic.run import Run, Stream

pytestmark = pytest.mark.gpu

EDIT = (
    "Change lamp to kite in this text and repeat it: Mia had a red lamp. One day Mia took it to the garden and forgot "
    "it there. It rained all night. In the morning a clever fox came by and carried it home in the straw of the barn."
)
STORY = "Tell me a story about Zelda and a boat."
SCENE = [("circle", "red", 0.15, 0.3), ("circle", "red", 0.25, 0.75), ("square", "blue", 0.5, 0.5)]


def picture() -> bytes:
    data = io.BytesIO()
    draw(SCENE).save(data, "PNG")
    return data.getvalue()


class Box:
    """An opened model and the records of its runs."""

    def __init__(self, device: str, form: str = "exact"):
        self.runs: dict[str, Run] = {}
        self.opened = open_model(None, device, Settings(form=form), lambda event: self.runs[event.run].apply(event))

    def submit(self, text: str, image: bytes | None = None, streams: int = 1, cache: bool = True, **params) -> Run:
        images = {hashlib.sha256(image).hexdigest(): image} if image else {}
        parts = [protocol.ImageRef(digest, "scene.png") for digest in images]
        prompt = self.opened.prepare([protocol.Message("user", [*parts, protocol.Text(text)])], images)
        sampling = self.opened.sampling(protocol.Params(**params), prompt)
        run = Run(f"run-{len(self.runs)}", time.time(), streams=[Stream() for _ in range(streams)])
        self.runs[run.id] = run
        make = self.opened.text.detokenizer
        self.opened.engine.submit(Request(run.id, prompt, sampling, streams, time.perf_counter(), 0.0, make, cache))
        return run

    def run(self, *args, **kwargs) -> Run:
        run = self.submit(*args, **kwargs)
        self.drain()
        assert run.status == "done", run.error
        return run

    def drain(self) -> None:
        while self.opened.engine.step():
            pass


@pytest.fixture(scope="module", params=["bf16", "exact"])
def gpu(request) -> Box:
    return Box("cuda:0", request.param)


SEEDED = {"temperature": 0.8, "seed": 3, "max_tokens": 60}


@pytest.mark.parametrize("params", [{}, SEEDED], ids=["greedy", "seeded"])
def test_drafted_is_serial_and_resumed_is_cold(gpu, params):
    for text, image in ((EDIT, None), (STORY, None), ("Describe the picture.", picture())):
        cold = gpu.run(text, image, cache=False, draft="off", **params)
        for _ in range(2):
            warm = gpu.run(text, image, **params)
            assert warm.streams[0].token_ids == cold.streams[0].token_ids
    assert gpu.run(EDIT, **params).stats["cached_tokens"] == 64


def test_concurrent_is_solo(gpu):
    stories = [f"Tell me a story about {name} and a boat." for name in ("Mia", "Ben", "Zoe")]
    solo = [gpu.run(story, cache=False, **SEEDED) for story in stories]
    together = [gpu.submit(story, **SEEDED) for story in stories]
    edit = gpu.submit(EDIT, streams=4, temperature=1, seed=1, max_tokens=40)
    gpu.drain()
    assert [run.streams[0].token_ids for run in together] == [run.streams[0].token_ids for run in solo]
    assert edit.status == "done"


def test_the_gpu_says_what_the_cpu_says():
    gpu, cpu = Box("cuda:0"), Box("cpu")
    asks = [(EDIT, None), (STORY, None), ("What is 17 + 25?", None), ("How many red circles are there?", picture())]
    for text, image in asks:
        assert gpu.run(text, image).streams[0].token_ids == cpu.run(text, image).streams[0].token_ids, text
