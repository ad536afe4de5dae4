"""The settings of PyTorch's caching allocator, as `PYTORCH_CUDA_ALLOC_CONF` gives them.

Names and defaults are those of `c10/core/AllocatorConfig.h` (PyTorch 2.13).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from trial_lib.foresee.memory.rounding import SMALLEST_BLOCK
from trial_lib.wire.errors import InputError

_MIB = 2**20
# The first that is set counts (`c10/core/AllocatorConfig.h`). The second is the older name.
_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# A value may be a list in brackets, whose commas separate nothing.
_PAIR = re.compile(r"\s*(\w+)\s*:\s*(\[[^\]]*\]|[^,]*)\s*(?:,|$)")


@dataclass(frozen=True, kw_only=True)
class AllocatorSettings:
    """Settings of the allocator.

    Attributes:
        expandable_segments: whether segments grow instead of having the size of a request.
        max_split_size: bytes of the largest block that may be split; None if all may be.
        max_non_split_rounding: bytes that a block which may not be split can be larger than a request.
        roundup_power2_divisions: steps between two powers of two to which requests are rounded, by the power of two (in
            MiB) from which they hold. Empty if requests are rounded to 512 bytes.
    """

    expandable_segments: bool = False
    max_split_size: int | None = None
    max_non_split_rounding: int = 20 * _MIB
    roundup_power2_divisions: tuple[tuple[int, int], ...] = ()

    @classmethod
    def of_environment(cls, environment: Mapping[str, str]) -> "AllocatorSettings":
        """Returns the settings of a program's variables.

        Raises:
            InputError: a value cannot be read.
        """
        variable = next((name for name in _VARIABLES if environment.get(name)), _VARIABLES[0])
        return cls.parse(environment.get(variable, ""))

    @classmethod
    def parse(cls, text: str) -> "AllocatorSettings":
        """Returns the settings of a variable's value. Other keys do not change sizes.

        Raises:
            InputError: a value cannot be read.
        """
        found: dict[str, str] = {match[1]: match[2] for match in _PAIR.finditer(text)}
        split, rounding = found.get("max_split_size_mb"), found.get("max_non_split_rounding_mb")
        return cls(
            expandable_segments=found.get("expandable_segments", "").strip().lower() == "true",
            max_split_size=None if split is None else _number(split, "max_split_size_mb") * _MIB,
            max_non_split_rounding=20 * _MIB
            if rounding is None
            else _number(rounding, "max_non_split_rounding_mb") * _MIB,
            roundup_power2_divisions=_divisions(found.get("roundup_power2_divisions", "")),
        )

    def rounded(self, request: int) -> int:
        """Returns the bytes of the block for a request (`round_size`)."""
        if request < SMALLEST_BLOCK:
            return SMALLEST_BLOCK
        steps = self._divisions_at(request)
        if steps > 1 and request > SMALLEST_BLOCK * steps:
            return _next_division(request, steps)
        return -(-request // SMALLEST_BLOCK) * SMALLEST_BLOCK

    def _divisions_at(self, request: int) -> int:
        steps = 0
        for begin, value in self.roundup_power2_divisions:
            if request >= begin * _MIB or not steps:
                steps = value
        return steps


def _next_division(request: int, steps: int) -> int:
    floor = 1 << (request.bit_length() - 1)
    if request == floor:
        return request
    division = floor >> (steps.bit_length() - 1)
    return floor << 1 if division == 0 else -(-request // division) * division


def _divisions(text: str) -> tuple[tuple[int, int], ...]:
    text = text.strip()
    if not text:
        return ()
    if not text.startswith("["):
        return ((0, _number(text, "roundup_power2_divisions")),)
    pairs = [pair.partition(":") for pair in text.strip("[]").split(",") if pair.strip()]
    listed = [(begin.strip(), _number(steps, "roundup_power2_divisions")) for begin, _, steps in pairs]
    known = sorted((_number(begin, "roundup_power2_divisions"), steps) for begin, steps in listed if begin != ">")
    others = [(2 * known[-1][0] if known else 0, steps) for begin, steps in listed if begin == ">"]
    return (*known, *others)


def _number(text: str, key: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise InputError(
            f"{key}:{text.strip()} is not a whole number.", where=" or ".join(_VARIABLES), remedy="Write one."
        ) from None
