"""Answers for code that asks a fake tensor for a number: a table of known askers, and a default for all others.

An asker is named by the end of its file's path and by its function. The first row that fits answers. A yes or no is no,
unless a row says True.
"""

from dataclasses import dataclass
from typing import Any

FINITE = 1.0
"""The default for a floating-point number: neither zero nor infinite."""


@dataclass(frozen=True)
class KnownAsker:
    """One place in a library that asks for a number.

    Attributes:
        path: the end of its file's path.
        function: its name; empty for every function of the file.
        answer: the value that a healthy training gives there.
        why: the meaning of the number.
    """

    path: str
    function: str
    answer: Any
    why: str


KNOWN: tuple[KnownAsker, ...] = (
    KnownAsker("deepspeed/runtime/utils.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "check", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/utils.py", "_has_inf_or_nan", FINITE, "the sum of a gradient"),
    KnownAsker("deepspeed/runtime/utils.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage3.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "has_overflow", False, "whether gradients overflow"),
    KnownAsker("deepspeed/runtime/zero/stage_1_and_2.py", "", FINITE, "a norm, or a sum of gradients"),
    KnownAsker("deepspeed/runtime/zero/partition_parameters.py", "", False, "whether a rank has modified parameters"),
    KnownAsker("deepspeed/runtime/bf16_optimizer.py", "", FINITE, "a norm"),
    KnownAsker("deepspeed/runtime/fp16/", "", FINITE, "a norm, a sum of gradients or a loss scale"),
    KnownAsker("deepspeed/runtime/engine.py", "", FINITE, "a loss or a norm"),
)
"""DeepSpeed's own asks."""


def known(path: str, function: str) -> KnownAsker | None:
    """Returns the row for an asker; None if it is unknown."""
    for row in KNOWN:
        is_here = f"/{row.path}" in path if row.path.endswith("/") else path.endswith(f"/{row.path}")
        if is_here and row.function in ("", function):
            return row
    return None
