"""`python -m tests.soak [SECONDS] [SEED]`: a storm of that length, then every reply again, cold and alone."""

from __future__ import annotations

import os
import sys
import tempfile

from .storm import Storm


def main(seconds: int = 120, seed: int = 0) -> None:
    with tempfile.TemporaryDirectory(prefix="tfm-", dir="/tmp") as path:
        os.environ["TFMAGIC_RUNTIME_DIR"] = path
        with Storm(seed) as storm:
            storm.rage(seconds)
            storm.check()
            print(storm.report())


main(*map(int, sys.argv[1:]))
