"""What `torch.compile` has done in this process, and how it is kept out of the way.

Nothing here imports Dynamo: a program that compiles nothing has no use for the second that this takes.
"""

import contextlib
import sys
from typing import Any

import torch

from trial_lib.intercept import post_import
from trial_lib.intercept.own_rooms import OWN_ROOMS

# Of `torch._dynamo.utils.counters`, each of which goes up where code is compiled: functions that Dynamo has looked at,
# graphs that it has made, and those of compiled autograd.
_COUNTERS = (("frames", "total"), ("stats", "unique_graphs"), ("compiled_autograd", "captures"))


def install() -> None:
    """Has Dynamo compile nothing of what stands in for the functions of an engine; before the program runs."""

    def leave_alone(rules: Any) -> None:
        for room in OWN_ROOMS:
            rules.add(f"trial_lib.{room}")

    post_import.when_imported("torch._dynamo.trace_rules", leave_alone)


def compilations() -> int:
    """Returns a number that changes whenever something is compiled in this process; 0 before anything is."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(dynamo, "counters", {})
    return sum(counters[group][name] for group, name in _COUNTERS if group in counters)


class NewCompilations:
    """Tells in which steps something is compiled."""

    def __init__(self) -> None:
        self._before = compilations()

    def were_made(self) -> bool:
        """Returns whether something has been compiled since this was last asked."""
        before, self._before = self._before, compilations()
        return before != self._before


def can_run_eagerly() -> bool:
    """Returns whether the program can be run as if it compiled nothing, and be compiled afterwards all the same."""
    return not compilations() or hasattr(torch.compiler, "set_stance")


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Has compiled functions run as they are written, while it is entered, and leaves alone what is compiled of them.

    Without it Dynamo gives a function up for good that it meets under a dispatch mode, such as one that counts FLOPs
    (pytorch/pytorch#190286), and refuses one that has to be a single graph.

    Raises:
        RuntimeError: the caller itself runs in a compiled function.
    """
    # torch < 2.6 has none, and imports Dynamo for it.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Has everything compiled anew, as in a fresh process.

    Dynamo takes a size that has changed once for one that will change again, and compiles for sizes of any kind.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is not None:
        dynamo.reset()
