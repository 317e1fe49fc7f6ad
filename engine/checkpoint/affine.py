"""MLX's affine quantisation: what config.json says of it, and a packed matrix.

A matrix [N, K] is cut into groups of `group` values along K; each group has one scale and one bias, and
value = scale · q + bias with `bits`-bit q. The q lie in 32-bit words, the first value in the lowest bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tfmagic.errors import Refusal

from .names import normalised

if TYPE_CHECKING:
    import torch

BITS = (4, 8)
GROUPS = (32, 64, 128)
PLAIN = "Use the bf16 checkpoint, or one of 4 or 8 bits in groups of 32, 64 or 128."


class Form(NamedTuple):
    """How a module is packed. The defaults are MLX's own for what a map of options leaves out."""

    bits: int = 4
    group: int = 64


@dataclass(frozen=True)
class Affine:
    """A packed matrix [N, K]."""

    q: torch.Tensor
    """uint32 [N, K · bits / 32]."""
    scales: torch.Tensor
    """[N, K / group], bfloat16, float16 or float32."""
    biases: torch.Tensor
    """As `scales`."""
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        return self.q.shape[0], self.q.shape[1] * 32 // self.bits

    def dequantised(self) -> torch.Tensor:
        """float32 [N, K]. With scales of 16 bits scale · q is exact, so that a value is rounded once."""
        import torch

        rows, columns = self.shape
        values = self.q.view(torch.uint8)  # little-endian: a word's bytes in the order of its values
        if self.bits == 4:
            values = torch.stack([values & 15, values >> 4], -1)
        groups = values.view(rows, columns // self.group, self.group).float()
        return groups.mul_(self.scales.float()[..., None]).add_(self.biases.float()[..., None]).view(rows, columns)


class Scheme:
    """What config.json says of each module. Raises Refusal for what is not read."""

    def __init__(self, config: dict[str, Any], model: str):
        self.model = model
        options = self._options(config)
        self.default = self._form(options, "the model") if options else None
        self.modules: dict[str, Form | None] = {}
        for spelt, value in options.items():
            if isinstance(value, dict | bool) or value is None:
                self._add(module(spelt), spelt, value)

    def of(self, module: str) -> Form | None:
        """How a module that is packed must be packed; None: it must not be."""
        return self.modules.get(module, self.default)

    def _options(self, config: dict[str, Any]) -> dict[str, Any]:
        """MLX's options, {} where there are none. `quantization` is MLX's own key and wins over
        `quantization_config`, which it repeats; the top level wins over text_config."""
        for part in (config, config.get("text_config", {})):
            given = [part[key] for key in ("quantization", "quantization_config") if key in part]
            if len(given) == 2 and of_mlx(given[1]) and given[0] != given[1]:
                problem = f"{self.model}: config.json's quantization and quantization_config differ."
                raise Refusal(problem, "Remove the one that does not describe the weights.")
            if given:
                return self._known(given[0] or {})
        return {}

    def _known(self, options: Any) -> dict[str, Any]:
        if options and not of_mlx(options):
            method = options.get("quant_method", "unnamed") if isinstance(options, dict) else options
            raise Refusal(f"{self.model} is quantised ({str(method)[:40]}), which is not read yet.", PLAIN)
        return options

    def _form(self, options: dict[str, Any], what: str) -> Form:
        form = Form(options.get("bits", Form().bits), options.get("group_size", Form().group))
        mode = options.get("mode", "affine")
        if mode != "affine":
            problem = f"{self.model} is quantised by MLX's mode {str(mode)[:40]!r}, which is not read yet."
            raise Refusal(problem, PLAIN)
        sound = type(form.bits) is type(form.group) is int and form.bits in BITS and form.group in GROUPS
        if not sound:
            bits, group = (repr(value)[:20] for value in form)
            raise Refusal(f"{self.model}: config.json packs {what} in {bits} bits by groups of {group}.", PLAIN)
        return form

    def _add(self, name: str, spelt: str, value: dict[str, Any] | bool | None) -> None:
        form = self.default if value is True else self._form(value, spelt[:80]) if value else None
        if self.modules.setdefault(name, form) != form:
            problem = f"{self.model}: config.json says two things of {name[:80]}, under two of its names."
            raise Refusal(problem, "Remove the entry that does not describe the weights.")


def module(spelt: str) -> str:
    """A module's normalised name."""
    return normalised(spelt + ".").removesuffix(".")


def of_mlx(options: object) -> bool:
    """Whether these are MLX's options, which name no other method and give bits, a group or modules."""
    if not isinstance(options, dict) or options.get("quant_method", "mlx") != "mlx":
        return False
    return bool({"bits", "group_size"} & options.keys()) or any(isinstance(v, dict | bool) for v in options.values())
