"""Reading a model's folder: where it is (`resolve`), what is in it (`Checkpoint`), its weights (`Tensors`), of which
packed ones come in pieces (`Affine`).

Everything is checked before it is used, and nothing in a checkpoint is ever executed: JSON, safetensors and a
sandboxed chat template are all that is read.
"""

from .affine import Affine
from .folder import Checkpoint
from .resolve import resolve
from .tensors import Tensors

__all__ = ["Affine", "Checkpoint", "Tensors", "resolve"]
