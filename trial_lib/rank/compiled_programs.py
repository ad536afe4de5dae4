"""The compilations of `torch.compile` in this process, and ways to suspend them.

Nothing here imports Dynamo, because the import takes a second that a program without compilation should not pay.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

from zerotune.trial_lib.rank import patching

# Keys of `torch._dynamo.utils.counters` that grow when code is compiled. They count functions that Dynamo has traced,
# graphs that it has made, and graphs of compiled autograd.
_COUNTERS = (("frames", "total"), ("stats", "unique_graphs"), ("compiled_autograd", "captures"))

# The name by which compiled code has `__main__` in the globals of other modules (torch/_dynamo/symbolic_convert.py
# import_source).
_KEPT_MAIN = "__import___main__"


def install() -> None:
    """Stops Dynamo from compiling the replacements of an engine's functions, before the program runs."""
    # It compiles a recomputed block, which would be in pieces otherwise.
    compiled = ("turning", "recomputation", "__init__")
    # Looked up now, because the program may change folders later.
    left = [file.stem for file in Path(__file__).parent.glob("*.py") if file.stem not in compiled]

    def leave_alone(rules: Any) -> None:
        for name in left:
            rules.add(f"zerotune.trial_lib.rank.{name}")

    patching.when_imported("torch._dynamo.trace_rules", leave_alone)


def compilations() -> int:
    """Returns a number that changes with each compilation in this process; 0 before the first."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    counters: Any = getattr(dynamo, "counters", {})
    return sum(counters[group][name] for group, name in _COUNTERS if group in counters)


class NewCompilations:
    """Detects the steps in which something is compiled."""

    def __init__(self) -> None:
        self._before = compilations()

    def were_made(self) -> bool:
        before, self._before = self._before, compilations()
        return before != self._before


def can_run_eagerly() -> bool:
    """Returns whether the program can be run without compilation, and compiled again afterwards."""
    return not compilations() or hasattr(torch.compiler, "set_stance")


def eagerly() -> contextlib.AbstractContextManager[Any]:
    """Runs compiled functions as written while entered, and keeps their code. RuntimeError within a compiled function.

    Under a dispatch mode such as a FLOP counter, Dynamo would give up a function for good (pytorch/pytorch#190286), or
    refuse one that has to be a single graph.
    """
    # torch < 2.6 does not have it, and would import Dynamo for it.
    if "torch._dynamo" not in sys.modules or not hasattr(torch.compiler, "set_stance"):
        return contextlib.nullcontext()
    stance: contextlib.AbstractContextManager[Any] = torch.compiler.set_stance("force_eager")
    return stance


def forget_compiled() -> None:
    """Drops all compiled code, so that everything is compiled as in a fresh process.

    Dynamo takes a size that has changed once for a dynamic size, and compiles for sizes of any kind. It also keeps the
    module `__main__` of the first compilation, which is another one when the program is run again.
    """
    dynamo = sys.modules.get("torch._dynamo")
    if dynamo is None:
        return
    dynamo.reset()
    convert = sys.modules.get("torch._dynamo.symbolic_convert")
    getattr(getattr(convert, "_import_module", None), "cache_clear", lambda: None)()
    for module in list(sys.modules.values()):
        names = getattr(module, "__dict__", None)
        if type(names) is dict:
            names.pop(_KEPT_MAIN, None)
