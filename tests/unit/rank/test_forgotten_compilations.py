"""A program that compiles and is run again in the same process finds the process as at first."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from zerotune.trial_lib.rank.torch_functions import forget_compiled

PROGRAM = """
count = 0

def counted(x):
    global count
    count += 1
    return x + 1
"""


@pytest.fixture
def as_main() -> Iterator[Callable[[ModuleType], None]]:
    own = sys.modules["__main__"]
    yield lambda module: sys.modules.__setitem__("__main__", module)
    sys.modules["__main__"] = own
    forget_compiled()


def test_the_globals_of_the_second_run_are_those_of_its_own_main(
    as_main: Callable[[ModuleType], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    library: Any = ModuleType("some_library")
    monkeypatch.setitem(sys.modules, "some_library", library)
    exec("def calls(function, x):\n    return function(x)", library.__dict__)
    for run in range(2):
        main = ModuleType("__main__")
        as_main(main)
        exec(PROGRAM, main.__dict__)
        compiled = torch.compile(library.calls, backend="eager")
        assert torch.equal(compiled(main.__dict__["counted"], torch.zeros(2)), torch.ones(2)), run
        assert main.__dict__["count"] == 1
        main.__dict__.clear()
        forget_compiled()
