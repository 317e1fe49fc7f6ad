"""The model that ships with tfmagic, and the recipe that made it."""

from pathlib import Path

MODEL = Path(__file__).parent / "model"
