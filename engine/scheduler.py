"""Who runs next: admit what fits, prompt slices within a budget of rows, then a round over every decoding stream."""

from __future__ import annotations

from collections import deque

from .stream import Job, Stream

STREAMS = 16
"""Streams that decode together at most."""
SLICE, SLICE_BESIDE = 256, 128
"""Prompt rows a step: with nobody decoding, and beside decoding streams, which wait for them."""


class Scheduler:
    """Invariants: first come, first admitted; at most STREAMS streams are admitted; a job is in exactly one list."""

    def __init__(self):
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []

    def admit(self) -> list[Job]:
        """Move jobs from the queue's head while all streams of the next one fit."""
        admitted = []
        taken = sum(job.request.streams for job in self.running)
        while self.waiting and taken + self.waiting[0].request.streams <= STREAMS:
            admitted.append(self.waiting.popleft())
            taken += admitted[-1].request.streams
        self.running += admitted
        return admitted

    def prefilling(self) -> list[Job]:
        return [job for job in self.running if job.work is not None]

    def decoding(self) -> list[tuple[Job, Stream]]:
        return [(job, stream) for job in self.running for stream in job.live]

    def budget(self) -> int:
        """Prompt rows of this step."""
        return SLICE_BESIDE if self.decoding() else SLICE

    def find(self, run: str) -> Job | None:
        return next((job for job in (*self.running, *self.waiting) if job.run == run), None)

    def remove(self, job: Job) -> None:
        (self.running if job in self.running else self.waiting).remove(job)

    @property
    def busy(self) -> bool:
        return bool(self.running or self.waiting)
