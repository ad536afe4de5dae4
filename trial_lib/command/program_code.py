"""Finds out whether a Python program may start its ranks itself, and what it imports first.

It reads the code and imports nothing.
"""

import ast
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from trial_lib.command.elsewhere.started import UNMISTAKABLE
from trial_lib.command.launchers import LAUNCHERS, all_modules, first_words, firsts

_MOST_FILES = 300

# A program that imports one of these, or calls one of these, starts processes that train.
_MODULES = re.compile(
    r"torch\.distributed\.(run|launch|launcher|elastic)\b|deepspeed\.launcher\b|accelerate\.commands\b"
    r"|(pytorch_)?lightning\b|(lightning_)?fabric\b|submitit\b"
)
_CALLS = re.compile(
    r"(^|\.)(notebook_launcher|debug_launcher|elastic_launch)$"
    r"|(^|\.)(mp|multiprocessing)\.(spawn|start_processes)$"
    r"|^os\.(exec|spawn|posix_spawn)\w*$"
)
# Names by which a file starts processes. If it does, its texts may be a launcher's command.
_STARTS_PROCESSES = ("subprocess", "os.system", "os.popen", "os.exec", "os.spawn", "os.posix_spawn", "asyncio", "sh")


def may_start_ranks(file: Path, folders: Sequence[Path]) -> bool:
    """Returns whether a program, or a module of its own that it imports, may start launchers or ranks.

    Args:
        file: the program's file.
        folders: the folders of its own modules.
    """
    return any(_starts(tree, imported) for tree, imported in own_code(file, folders))


def mentions(file: Path, folders: Sequence[Path], word: str) -> bool:
    """Returns whether a program, or a module of its own that it imports, has a word in a name or in a string.

    Args:
        file: the program's file.
        folders: the folders of its own modules.
        word: the word.
    """
    for tree, imported in own_code(file, folders):
        names = (node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg)
        if any(word in text for text in (*imported, *names, *texts(tree))):
            return True
    return False


def leading_imports(file: Path, folders: Sequence[Path]) -> list[str]:
    """Returns the imports at the head of a program, one statement each, as far as they are of installed modules.

    They come before any code of the program's own, which may set what a later import reads.

    Args:
        file: the program's file.
        folders: the folders of its own modules.
    """
    try:
        body = ast.parse(file.read_bytes()).body
    except (OSError, SyntaxError, ValueError, RecursionError):
        return []
    found: list[str] = []
    for statement in body:
        if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
            continue
        names = _modules_of(statement)
        if not names or any(module_file(name, folders) is not None for name in names):
            break
        found += [] if sys.stdlib_module_names.issuperset(names) else [ast.unparse(statement)]
    return found


def _modules_of(statement: ast.stmt) -> list[str]:
    """Returns the top-level packages that a statement imports; none for any other statement."""
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return [(statement.module or "").partition(".")[0]]
    return []


def own_code(file: Path, folders: Sequence[Path]) -> Iterator[tuple[ast.Module, list[str]]]:
    """Yields the code of a program and of each of its own modules, with the names that each imports.

    Args:
        file: the program's file.
        folders: the folders of its own modules.
    """
    waiting, seen = [file], set[Path]()
    while waiting and len(seen) < _MOST_FILES:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        try:
            tree = ast.parse(path.read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            continue
        imported = list(_imported(tree, path, folders))
        yield tree, [name for name, _ in imported]
        waiting += [found for _, found in imported if found is not None]


def _starts(tree: ast.Module, imported: Sequence[str]) -> bool:
    used = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func)]
    if any(_MODULES.match(name) for name in imported) or any(_CALLS.search(name) for name in used):
        return True
    starting = [name for name in (*imported, *used) if name.startswith(_STARTS_PROCESSES)]
    return bool(starting) and any(_names_launcher().search(text) for text in texts(tree))


def _names_launcher() -> re.Pattern[str]:
    """Returns what finds a launcher, a scheduler or a container in a text. `deepspeed_config` and `deepspeed.json` name
    none.
    """
    starting = [launcher for launcher in LAUNCHERS.values() if not launcher.is_environment]
    programs = (program for launcher in starting for program in first_words(launcher))
    named = "|".join(map(re.escape, (*programs, *firsts(tuple(all_modules())), *UNMISTAKABLE)))
    return re.compile(rf"\b({named})\b(?!_|\.json)")


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def texts(tree: ast.Module) -> Iterator[str]:
    """Yields the strings of a program. A string that stands by itself is a comment, and is left out."""
    explaining = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explaining:
            yield node.value


def _imported(tree: ast.Module, file: Path, folders: Sequence[Path]) -> Iterator[tuple[str, Path | None]]:
    """Yields the modules that a file imports, each with its file if one of the folders has it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, module_file(alias.name, folders)
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            within = [file.parents[node.level - 1]] if 0 < node.level <= len(file.parents) else folders
            yield module, module_file(module, within) if module else None
            for alias in node.names:
                name = f"{module}.{alias.name}" if module else alias.name
                yield name, module_file(name, within)


def module_file(module: str, folders: Sequence[Path], of_package: str = "__init__.py") -> Path | None:
    """Returns the file of a module in the first folder that has it. For a package it is `of_package` in its folder."""
    for folder in folders:
        path = folder.joinpath(*module.split("."))
        for file in (path.with_suffix(".py"), path / of_package):
            try:
                if file.is_file():
                    return file
            except OSError:  # The name is too long for a file, or the folder may not be entered.
                continue
    return None
