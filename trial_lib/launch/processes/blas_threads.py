"""The threads of OpenBLAS, the library in numpy and scipy. It starts them when it is loaded. A fork has none of them.

The fork server loads it with one thread, because it must not have more. A fork starts as many threads as a new
interpreter would have. Runs in the user's environment.
"""

import contextlib
import ctypes
import os
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path

NUMBER = "OPENBLAS_NUM_THREADS"
"""The environment variable with OpenBLAS's number of threads. It takes precedence over all others."""

_NUMBERS = (NUMBER, "GOTO_NUM_THREADS", "OMP_NUM_THREADS")
_PREFIXES, _SUFFIXES = ("", "scipy_"), ("", "64_", "_64")  # as its builds name their functions


def start_threads(environment: Mapping[str, str]) -> None:
    """Has each OpenBLAS that was loaded before a fork start the threads that it would start in a new interpreter.

    Args:
        environment: the environment variables of the fork.
    """
    number = _number(environment)
    if number == 1:
        return
    for library in _loaded():
        for prefix, suffix in product(_PREFIXES, _SUFFIXES):
            set_number = getattr(library, f"{prefix}openblas_set_num_threads{suffix}", None)
            if set_number is not None:
                set_number(number)


def _number(environment: Mapping[str, str]) -> int:
    for name in _NUMBERS:
        with contextlib.suppress(KeyError, ValueError):
            if (number := int(environment[name])) > 0:
                return number
    return len(os.sched_getaffinity(0))


def _loaded() -> Iterator[ctypes.CDLL]:
    mapped = {
        line.split(maxsplit=5)[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "openblas" in line
    }
    for path in sorted(mapped):
        with contextlib.suppress(OSError):
            yield ctypes.CDLL(path)
