"""Who runs next: admit what fits, prompt slices within a budget of rows, then a round over every decoding stream."""

from __future__ import annotations

from collections import deque

from .stream import Job, Stream

STREAMS = 16
"""Streams that decode together at most."""
SLICE, SLICE_BESIDE = 256, 128
"""Rows of one prompt a step: with nobody decoding, and beside decoding streams, which wait for them."""


class Scheduler:
    """Invariants: first come, first admitted; at most STREAMS streams are admitted, and no more than fit into memory
    when each has grown to its end; a job is in exactly one list."""

    def __init__(self, memory: int):
        """`memory`: bytes of all admitted streams together."""
        self.memory = memory
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def admit(self) -> list[Job]:
        """Move jobs from the queue's head while all streams of the next one fit."""
        admitted = []
        while self.waiting and self._fits(self.waiting[0]):
            admitted.append(self.waiting.popleft())
            self.running.append(admitted[-1])
        return admitted

    def _fits(self, job: Job) -> bool:
        streams = sum(other.request.streams for other in self.running) + job.request.streams
        return streams <= STREAMS and sum(other.bytes for other in self.running) + job.bytes <= self.memory

    def prefilling(self) -> list[Job]:
        return [job for job in self.running if job.work is not None or job.rows is not None]

    def decoding(self) -> list[tuple[Job, Stream]]:
        return [(job, stream) for job in self.running for stream in job.live]

    def budget(self, packed: int, slices: tuple[int, int] | None = None) -> tuple[int, int]:
        """Rows of one prompt in this step, and of all together: `packed` where no stream has to wait for them.
        `slices`: the model's own in place of SLICE and SLICE_BESIDE."""
        alone, beside = slices or (SLICE, SLICE_BESIDE)
        return (beside, beside) if self.decoding() else (alone, max(alone, packed))

    def find(self, run: str) -> Job | None:
        return next((job for job in (*self.running, *self.waiting) if job.run == run), None)

    def remove(self, job: Job) -> None:
        (self.running if job in self.running else self.waiting).remove(job)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)
