"""Errors that a person reads: what happened, then what to do."""

from __future__ import annotations


class TfmagicError(Exception):
    """An error of ours, in two lines and without a traceback in a notebook; the cell still fails.

    `problem` says what happened, `fix` what to do; one line each.
    """

    def __init__(self, problem: str, fix: str):
        super().__init__(problem, fix)
        self.problem, self.fix = problem, fix

    def __str__(self) -> str:
        return f"{self.problem}\n{self.fix}"

    def _render_traceback_(self) -> list[str]:
        """IPython shows these lines in place of a traceback."""
        return [f"{type(self).__name__}: {self.problem}", self.fix]


class Refusal(TfmagicError):
    """The engine does not take this request; nothing was computed and nothing is held."""


class EngineDied(TfmagicError):
    """The resident engine went away; the next `%%tfold` starts a fresh one."""


class EngineFailed(TfmagicError):
    """The engine could not start, or a run failed inside it."""


class Interrupted(TfmagicError):
    """The run was stopped from this kernel; what it had said is kept."""
