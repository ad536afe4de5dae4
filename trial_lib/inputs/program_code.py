"""Finds out whether a Python program may start its ranks itself, and what it imports first.

It reads the code and imports nothing.
"""

import ast
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotune.trial_lib.inputs.elsewhere import UNMISTAKABLE
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, parse_command, split_flag
from zerotune.trial_lib.inputs.launchers import (
    LAUNCHERS,
    NONE,
    UserLauncher,
    all_modules,
    first_words,
    firsts,
    launcher_of_program,
)
from zerotune.trial_lib.inputs.words import Words, ask, read_options
from zerotune.trial_lib.messages.errors import InputError

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
    """Returns whether a program, or a module of its own that it imports, may start launchers or ranks."""
    return any(_starts(tree, imported) for _, tree, imported in own_code(file, folders))


def mentions(file: Path, folders: Sequence[Path], word: str) -> bool:
    """Whether a program, or a module of its own that it imports, has a word in a name or in a string."""
    for _, tree, imported in own_code(file, folders):
        names = (node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg)
        if any(word in text for text in (*imported, *names, *texts(tree))):
            return True
    return False


def leading_imports(file: Path, folders: Sequence[Path]) -> list[str]:
    """Returns the imports at the head of a program, one statement each, as far as they are of installed modules.

    They come before any code of the program's own, which may set what a later import reads.
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
    # The top-level packages that a statement imports; none for any other statement.
    if isinstance(statement, ast.Import):
        return [alias.name.partition(".")[0] for alias in statement.names]
    if isinstance(statement, ast.ImportFrom) and not statement.level:
        return [(statement.module or "").partition(".")[0]]
    return []


def own_code(file: Path, folders: Sequence[Path]) -> Iterator[tuple[Path, ast.Module, list[str]]]:
    """Yields the files and code of a program and of its own modules, with the names that each imports."""
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
        yield path, tree, [name for name, _ in imported]
        waiting += [found for _, found in imported if found is not None]


def _starts(tree: ast.Module, imported: Sequence[str]) -> bool:
    used = [ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call) and _is_name(node.func)]
    if any(_MODULES.match(name) for name in imported) or any(_CALLS.search(name) for name in used):
        return True
    starting = [name for name in (*imported, *used) if name.startswith(_STARTS_PROCESSES)]
    return bool(starting) and any(_names_launcher().search(text) for text in texts(tree))


def _names_launcher() -> re.Pattern[str]:
    starting = [launcher for launcher in LAUNCHERS.values() if not launcher.is_environment]
    programs = (program for launcher in starting for program in first_words(launcher))
    named = "|".join(map(re.escape, (*programs, *firsts(tuple(all_modules())), *UNMISTAKABLE)))
    return re.compile(rf"\b({named})\b(?!_|\.json)")


def _is_name(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) or (isinstance(node, ast.Attribute) and _is_name(node.value))


def texts(tree: ast.Module) -> Iterator[str]:
    """Yields the strings of a program, without those that stand by themselves as comments."""
    explaining = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in explaining:
            yield node.value


def _imported(tree: ast.Module, file: Path, folders: Sequence[Path]) -> Iterator[tuple[str, Path | None]]:
    # The modules that a file imports, each with its file if one of the folders has it.
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


# `uv run`: a command in the environment of a uv project. uv itself says which Python that is.

_QUESTION = "import sys; print(sys.executable); print(sys.prefix if sys.prefix != sys.base_prefix else '')"
# uv may have to install the project first.
_LONGEST_ANSWER_S = 1800.0
_TRY_IT = "Try the command without zerotune."
_SYNC = "Add its requirements to the project (`uv add`), so that they are in the project's environment."
_ENV_FILE = "UV_ENV_FILE"
# A script's own requirements begin with this line (PEP 723).
_OWN_REQUIREMENTS = re.compile(rb"^# /// script\s*$", re.MULTILINE)


def read_uv_run(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    """Reads `[options] command` behind `uv run`. uv brings the project's environment up to date.
    Raises InputError: uv refuses its options, would make an environment for this run alone, or starts no training.
    """
    program = words.program
    typed = list(words.rest)
    options = read_options(words, launcher.shown, launcher.options, last=("--module", "--"))
    # These options go to uv again. The flag for a module belongs to the command.
    own = [word for word in typed[: len(typed) - len(words.rest)] if word not in ("-m", "--module", "--")]
    if words.environment.get(_ENV_FILE):
        raise words.error(f"{_ENV_FILE} is set, and ZeroTune reads no such file.", "Export its variables instead.")
    words.rest = _python_first(words.rest, "--module" in options)
    if not words:
        raise words.error("uv run names no command.")
    _refuse_own_requirements(words)
    inner_launcher = launcher_of_program(Path(words.first).name)
    if inner_launcher is not None and inner_launcher.runs_command:
        raise words.error(
            f"uv run starts {inner_launcher.shown}.", f"Write `{inner_launcher.shown} OPTIONS uv run ...` instead."
        )
    python, prefix = _ask(words, [program, "run", *own])
    words.rest[0] = _within(python, words.first, words.environment.get("PATH"))
    words.notes.append(f"uv run is left out: the ranks run with {python}.")
    inner = parse_command(words)
    variables = {"VIRTUAL_ENV": prefix} if prefix else {}
    return {**inner, "launcher_environment": {**inner.get("launcher_environment", {}), **variables}}


def command_within(words: Sequence[str], launcher: UserLauncher) -> list[str] | None:
    """Returns the command that `uv run` starts. None if its options cannot be followed."""
    inner = Words(list(words[len(launcher.shown.split()) :]), "the command", follows=True)
    try:
        options = read_options(inner, launcher.shown, launcher.options, last=("--module", "--"))
    except InputError:
        return None
    return _python_first(inner.rest, "--module" in options) or None


def _python_first(rest: list[str], is_module: bool) -> list[str]:
    # The words behind uv's options, with the `python` that uv puts in front of a script or a module.
    if is_module:
        return ["python", "-m", *rest]
    return ["python", *rest] if rest and rest[0].endswith(".py") else rest


def _refuse_own_requirements(words: Words) -> None:
    if words.first not in NONE.programs or len(words.rest) < 2:
        return
    script = words.folder / words.rest[1]
    if script.is_file() and _OWN_REQUIREMENTS.search(script.read_bytes()):
        raise words.error(f"{words.rest[1]} lists requirements of its own, which uv installs apart.", _SYNC)


def _within(python: str, program: str, path: str | None) -> str:
    if program in NONE.programs:
        return python
    if os.sep in program:
        return program
    folder = os.path.dirname(python)  # noqa: PTH120 - the folder of the environment's links, not of their target
    return shutil.which(program, path=os.pathsep.join([folder, path or os.defpath])) or program


def _ask(words: Words, uv_run: list[str]) -> tuple[str, str]:
    # The Python of the environment, and the environment's folder, or "" if it is no virtual one.
    try:
        asked = ask(words, [*uv_run, "python", "-c", _QUESTION], _LONGEST_ANSWER_S)
    except OSError as error:
        raise words.error(f"{uv_run[0]} cannot be started ({error.strerror}).", "Install uv.") from None
    except subprocess.TimeoutExpired:
        raise words.error("uv run has not started Python within half an hour.", _TRY_IT) from None
    answer = asked.stdout.splitlines()
    if asked.returncode != 0 or len(answer) < 2:
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise words.error(f"uv run cannot be asked for its environment ({last}).", _TRY_IT)
    return answer[-2], answer[-1]


# Whether DeepSpeed gets a command's configuration file unchanged.
#
# A program may read its file, remove what its DeepSpeed refuses, and hand over the rest as a dictionary. DeepSpeed
# surely gets the file itself if the program calls `deepspeed.initialize` with its `args`, and if neither that call nor
# any other line of the code names the configuration.

_CONFIG_FLAG = "--deepspeed_config"
_INITIALIZE = "deepspeed.initialize"
_CONFIG_ARGUMENTS = ("config", "config_params")
_POSITION_OF_CONFIG = 10
# These names give a program the path that its argument parser has read.
_NAMES_OF_CONFIG = ("deepspeed_config", "deepscale_config", "argv")


def is_handed_over(entrypoint: Entrypoint, folder: Path) -> bool:
    """Whether DeepSpeed surely gets the file behind `--deepspeed_config` unchanged."""
    if entrypoint.module is not None:
        program = module_file(entrypoint.module, (folder,), "__main__.py")
    else:
        program = None if entrypoint.script is None else folder / entrypoint.script
    words, positions = entrypoint.arguments, entrypoint.config_positions
    flags = [split_flag(words[position])[0].rstrip("=") or words[max(position - 1, 0)] for position in positions]
    if program is None or flags != [_CONFIG_FLAG] or entrypoint.config_variables:
        return False
    names = (*_NAMES_OF_CONFIG, *(Path(value).name for value in entrypoint.config_values))
    has_call = False
    for _, tree, imported in own_code(program, (program.parent, folder)):
        if _names_it(tree, names):
            return False
        calls = [node for node in ast.walk(tree) if isinstance(node, ast.Call)]
        for call in (call for call in calls if ast.unparse(call.func).rpartition(".")[2] == "initialize"):
            if not _gets_args_alone(call):
                return False
            called = ast.unparse(call.func)
            has_call |= called == _INITIALIZE or (called == "initialize" and _INITIALIZE in imported)
    return has_call


def _names_it(tree: ast.Module, names: Sequence[str]) -> bool:
    named = {
        *(node.id for node in ast.walk(tree) if isinstance(node, ast.Name)),
        *(node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)),
        *(node.arg for node in ast.walk(tree) if isinstance(node, ast.keyword) and node.arg),
    }
    own_texts = [text for text in texts(tree) if not text.startswith("--")]
    return not named.isdisjoint(names) or any(name in text for name in names for text in own_texts)


def _gets_args_alone(call: ast.Call) -> bool:
    # Whether a call passes `args`, and surely no configuration beside it.
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    if None in given or not given.keys().isdisjoint(_CONFIG_ARGUMENTS) or len(call.args) > _POSITION_OF_CONFIG:
        return False
    if any(isinstance(argument, ast.Starred) for argument in call.args):
        return False
    args = call.args[0] if call.args else given.get("args")
    return args is not None and not (isinstance(args, ast.Constant) and args.value is None)
