"""Every module that a text names is there: a string that has not followed a move fails where nobody looks."""

import ast
import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Neither a page, as `benchmarks.md` is, nor what every package has.
_DOTTED = re.compile(
    r"(?<![\w./-])(?:zerotune\.(?:flows|tasks|trial_lib)|benchmarks)\.(?!md\b)[a-z]\w*(?:\.[A-Za-z_]\w*)*"
)
_FILE = re.compile(r"(?<![\w./-])(?:flows|tasks|trial_lib|benchmarks|tests|deployments)/[\w/]+\.py\b")
_SUFFIXES = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".cfg", ""}


def texts() -> Iterator[Path]:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in tracked.stdout.splitlines():
        path = ROOT / name
        if path.suffix in _SUFFIXES and path.is_file() and path != Path(__file__):
            yield path


def resolves(dotted: str) -> bool:
    """Returns whether a dotted name is a package, a module, or something that a module defines or imports."""
    parts = dotted.split(".")
    for end in range(len(parts), 0, -1):
        base = ROOT.joinpath(*parts[:end])
        source = base / "__init__.py" if base.is_dir() else base.with_suffix(".py")
        if base.is_dir() and end == len(parts):
            return True
        if source.is_file():
            return end == len(parts) or parts[end] in _names(source)
    return False


@cache
def _names(file: Path) -> frozenset[str]:
    """Returns the names that a module has at its top level."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ClassDef() | ast.FunctionDef():
                found.add(node.name)
            case ast.Name() if isinstance(node.ctx, ast.Store):
                found.add(node.id)
            case ast.alias():
                found.add(node.asname or node.name)
            # `trial_lib` itself gives its names out by a table.
            case ast.Constant() if isinstance(node.value, str):
                found.add(node.value)
    return frozenset(found)


@pytest.mark.parametrize(
    ("dotted", "is_there"),
    [
        ("zerotune.trial_lib.study", True),
        ("zerotune.trial_lib.study.driver", True),
        ("zerotune.trial_lib.study.driver.StudyDriver", True),
        ("zerotune.trial_lib.study.drivers", False),
        ("zerotune.trial_lib.study.driver.NoSuchThing", False),
    ],
)
def test_what_is_there_is_told_from_what_is_not(dotted: str, is_there: bool) -> None:
    assert resolves(dotted) is is_there


def test_every_module_that_is_named_is_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {dotted}"
        for path in texts()
        for dotted in _DOTTED.findall(path.read_text(errors="replace"))
        if not resolves(dotted)
    }
    assert missing == set()


def test_every_file_that_is_named_is_there() -> None:
    missing = {
        f"{path.relative_to(ROOT)}: {name}"
        for path in texts()
        for name in _FILE.findall(path.read_text(errors="replace"))
        if not (ROOT / name).is_file()
    }
    assert missing == set()


def test_everything_that_is_imported_from_a_package_is_there() -> None:
    missing = set()
    for path in texts():
        if path.suffix != ".py":
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and _DOTTED.fullmatch(f"{node.module}.x"):
                names = [f"{node.module}.{alias.name}" for alias in node.names if alias.name != "*"]
                missing |= {f"{path.relative_to(ROOT)}: {name}" for name in names if not resolves(name)}
    assert missing == set()


def test_every_file_of_a_room_that_contributing_names_is_there() -> None:
    """Its table of subjects names files below `trial_lib`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    named = re.findall(r"`([a-z_]+/[\w/]+(?:\.py|/))`", text)
    missing = [name for name in named if not any((ROOT / base / name).exists() for base in ("", "trial_lib"))]
    assert missing == []
