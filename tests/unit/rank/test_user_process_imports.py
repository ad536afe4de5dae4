"""What runs in the user's process imports the standard library, torch and DeepSpeed alone."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PACKAGE = ROOT / "zerotune"
# Everything in these rooms, and whatever of ours it imports.
ROOMS = ("trial_lib/rank", "trial_lib/messages", "trial_lib/launch/processes")
# The last is a requirement of DeepSpeed's, so it is where DeepSpeed is.
AT_THE_TOP = {"torch", "deepspeed", "psutil"}
# Two more of DeepSpeed's requirements; one that only describes an error, and one that asks a GPU's driver. Each may be
# missing.
WITHIN_FUNCTIONS = {"hjson", "cpuinfo", "yaml", "pynvml"}


def test_nothing_else_is_imported() -> None:
    at_the_top: set[str] = set()
    within: set[str] = set()
    waiting = [file for room in ROOMS for file in (PACKAGE / room).glob("*.py")]
    seen: set[Path] = set()
    while waiting:
        file = waiting.pop()
        if file in seen:
            continue
        seen.add(file)
        for name, is_at_top in _imports(file):
            package = name.partition(".")[0]
            if package == "zerotune":
                waiting += [each for each in _files(name) if each.is_file()]
            elif package not in sys.stdlib_module_names:
                (at_the_top if is_at_top else within).add(package)
    assert len(seen) > sum(1 for room in ROOMS for _ in (PACKAGE / room).glob("*.py"))
    assert at_the_top - AT_THE_TOP == set()
    assert within - AT_THE_TOP - WITHIN_FUNCTIONS == set()


def _imports(file: Path) -> Iterator[tuple[str, bool]]:
    module = ast.parse(file.read_text())
    at_top = set(map(id, module.body))
    for node in ast.walk(module):
        if isinstance(node, ast.Import):
            yield from ((each.name, id(node) in at_top) for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            yield node.module, id(node) in at_top
            yield from ((f"{node.module}.{each.name}", id(node) in at_top) for each in node.names)


def _files(module: str) -> tuple[Path, Path]:
    path = ROOT.joinpath(*module.split("."))
    return path.with_suffix(".py"), path / "__init__.py"
