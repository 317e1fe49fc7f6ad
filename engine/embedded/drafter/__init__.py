"""The block drafter that ships beside the embedded model, and the recipe that made it."""

from .. import MODEL

DRAFTER = MODEL / "drafter"
