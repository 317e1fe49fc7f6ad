"""The resident engine, whose rounds take what they take on a machine that is not busy: which guesses are verified does
not follow the clock. `python steady_engine.py --runtime-dir ...`, as `tfmagic.engine.resident`."""

from __future__ import annotations

from tfmagic.engine.resident.__main__ import main


def open(*arguments):
    from tfmagic.engine.drafting.budget import Curve
    from tfmagic.engine.resident.worker import open_model

    class Steady(Curve):
        def learn(self, *_) -> None:
            pass

    opened = open_model(*arguments)
    opened.engine.drafting.curve = Steady({1: {1: 21.0, 8: 36.0}, 16: {16: 95.0, 64: 120.0}})
    return opened


if __name__ == "__main__":
    main(open=open)
