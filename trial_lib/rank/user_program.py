"""Runs the user's script or module as `python` would, and prints what Python would print when it fails."""

import contextlib
import os
import runpy
import sys
import traceback
from collections.abc import Iterator
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType, TracebackType

# Tracebacks of the user's leave their frames out.
_OWN_FOLDERS = tuple(str(Path(__file__).absolute().parents[1] / name) + os.sep for name in ("rank", "launch"))
_OF_PACKAGES = ("/site-packages/", "/dist-packages/")
_IMPORT = "<frozen importlib._bootstrap"
_RUNPY = ("<frozen runpy>", runpy.__file__)
# A longer traceback is cut in the middle.
_MOST_CHARACTERS = 200_000
_HALF = _MOST_CHARACTERS // 2


def run_program(program: dict[str, str], arguments: list[str]) -> None:
    """Runs `{"script": path}` or `{"module": name}` as `__main__`, with its own folder first on the path."""
    _let_workers_name_main()
    if "module" in program:
        sys.argv = [program["module"], *arguments]
        _first_on_path(str(Path.cwd()))
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)
        return
    script = program["script"]
    sys.argv = [script, *arguments]
    # Absolute, as in Python since 3.9. It still names the script after the program has changed its directory.
    path = str(Path(script).absolute())
    if not Path(path).is_file() or not path.endswith(".py"):
        # A folder or an archive with a `__main__.py`. If it is neither, `runpy` raises the error.
        runpy.run_path(path, run_name="__main__")
        return
    _first_on_path(str(Path(path).resolve().parent))
    loader = SourceFileLoader("__main__", path)
    main = ModuleType("__main__")
    main.__dict__.update(__file__=path, __loader__=loader, __spec__=None, __cached__=None)
    code = loader.source_to_code(Path(path).read_bytes(), path)
    _before.append(sys.modules["__main__"])
    sys.modules["__main__"] = main
    exec(code, main.__dict__)


def _let_workers_name_main() -> None:
    # Processes that the program spawns find its classes by the name `__mp_main__`, which `multiprocessing` sets when it
    # is imported. A primed rank has imported it before the program.
    stand_in = ModuleType("__mp_main__")
    stand_in.__getattr__ = lambda name: getattr(sys.modules["__main__"], name)  # type: ignore[method-assign]
    sys.modules["__mp_main__"] = stand_in


def _first_on_path(folder: str) -> None:
    if sys.path[0] != folder:
        sys.path.insert(0, folder)


def forget_program() -> None:
    """Drops everything that the ended program holds as `__main__`. Modules that it has imported stay."""
    if _before:
        main, sys.modules["__main__"] = sys.modules["__main__"], _before.pop()
        main.__dict__.clear()


# Python empties a module without references, and with it the functions that still run. This list keeps the module.
_before: list[ModuleType] = []


def without_own_frames(error: BaseException) -> BaseException:
    """The exception, its causes and contexts with the tracebacks that they would have without ZeroTune."""
    for link in _chain(error):
        link.__traceback__ = _user_frames(link.__traceback__)
    return error


def _chain(error: BaseException) -> Iterator[BaseException]:
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        link = waiting.pop()
        if link is None or id(link) in seen:
            continue
        seen.add(id(link))
        yield link
        waiting += [link.__cause__, link.__context__, *getattr(link, "exceptions", ())]


def _user_frames(trace: TracebackType | None) -> TracebackType | None:
    links: list[TracebackType] = []
    while trace is not None:
        links.append(trace)
        trace = trace.tb_next
    while links and _is_own_or(links[0], _RUNPY):
        links.pop(0)
    runs: list[list[TracebackType]] = []
    for link in links:
        # ZeroTune's frames and those of an import follow each other.
        is_ours = _is_own_or(link, (_IMPORT,))
        if is_ours and runs and _is_own_or(runs[-1][-1], (_IMPORT,)):
            runs[-1].append(link)
        else:
            runs.append([link])
    kept = [link for run in runs if not any(_is_own_or(link, ()) for link in run) for link in run]
    rebuilt: TracebackType | None = None
    for link in reversed(kept):
        rebuilt = TracebackType(rebuilt, link.tb_frame, link.tb_lasti, link.tb_lineno)
    return rebuilt


def may_be_of_the_user(name: str) -> bool:
    """Whether a file of code may be the user's (or Python's): neither ZeroTune's nor a package's."""
    return not name.startswith((*_OWN_FOLDERS, "<")) and not any(folder in name for folder in _OF_PACKAGES)


def _is_own_or(link: TracebackType, others: tuple[str, ...]) -> bool:
    return link.tb_frame.f_code.co_filename.startswith((*_OWN_FOLDERS, *others))


def say(error: BaseException) -> None:
    """Prints what Python prints when an exception ends a program. It raises nothing."""
    with contextlib.suppress(BaseException):
        if isinstance(error, SystemExit):
            if error.code is not None and not isinstance(error.code, int):
                print(error.code, file=sys.stderr, flush=True)
            return
        # The program has replaced it, or torch has, whose own prints the rank.
        sys.excepthook(type(error), error, error.__traceback__)
        sys.stderr.flush()


def text_of(error: BaseException) -> str:
    """The traceback as text. The middle of a long one is cut."""
    return shortened("".join(traceback.format_exception(type(error), error, error.__traceback__)))


def shortened(text: str) -> str:
    """Returns a text for a record. The middle of a long one is cut."""
    return text if len(text) <= _MOST_CHARACTERS else f"{text[:_HALF]}\n...\n{text[-_HALF:]}"
