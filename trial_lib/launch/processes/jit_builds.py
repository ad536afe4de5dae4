"""DeepSpeed's just-in-time builds, ahead of any deadline, and the locks that a killed build leaves behind.

Runs in the user's environment.
"""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_POLL_S = 0.2
_LOADING_S = 1.0  # of an op that is built, at most
_HELD = (errno.EAGAIN, errno.EACCES)  # that flock raises if another process has the lock
_REMOVAL_S = 0.1  # that a builder takes, at most, from closing its lock to removing it
# What DeepSpeed has in the place of an op that there is not on a CPU.
_NOT_THERE = "deepspeed_not_implemented"
_COLOUR = re.compile(r"\x1b\[\d+m")
_building: set[Path] = set()  # what this process builds


def _to_log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_says: list[Callable[[str], None]] = [_to_log]  # the last of them is told what this process waits for


def holds_open(path: Path) -> bool:
    """Returns whether any process has `path` open: torch's builder keeps its lock file open while it builds."""
    wanted = path.resolve()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in descriptors.iterdir():
                with contextlib.suppress(OSError):
                    if link.readlink() == wanted:
                        return True
    return False


def is_stale(lock: Path) -> bool:
    """Returns whether a build's lock is there, and its build was killed; every later build would wait for it for ever.

    One whose holder cannot be seen, for it is another user's, is not taken for stale; nor one of a build by ZeroTune on
    another host, or in another container, that shares the folder.
    """
    try:
        own = lock.stat().st_uid == os.getuid()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return own and not _builds_elsewhere(lock.parent) and not holds_open(lock)


def _builds_elsewhere(build_dir: Path) -> bool:
    """Returns whether another process holds the lock around torch's own, wherever it runs."""
    if build_dir in _building:
        return False
    with contextlib.suppress(FileNotFoundError), _lock_around(build_dir).open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except OSError as error:
            return error.errno in _HELD
    return False


def _lock_around(build_dir: Path) -> Path:
    return build_dir.parent / f".{build_dir.name}.zerotune.lock"


def clear_stale_lock(build_dir: Path) -> bool:
    """Removes the lock of a build that was killed; returns whether there was one."""
    lock = build_dir / "lock"
    if not is_stale(lock):
        return False
    # A builder that ends well closes its lock before it removes it, perhaps while all that is open was looked through.
    time.sleep(_REMOVAL_S)
    try:
        if not is_stale(lock):
            return False
        lock.unlink()
    except FileNotFoundError:
        return False
    return True


def build_folders(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders that torch builds extensions in, one each.

    Args:
        environment: of the ranks, which says where that is.
    """
    root = environment.get("TORCH_EXTENSIONS_DIR")
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is no home
    return list(Path(root).glob("*") if root else Path(home, ".cache", "torch_extensions").glob("*/*"))


def clear_stale_locks(environment: Mapping[str, str]) -> None:
    """Removes every lock that a killed process left; a rank that is killed while it loads an op leaves one too.

    Args:
        environment: of the ranks.
    """
    for folder in build_folders(environment):
        clear_stale_lock(folder)


@contextlib.contextmanager
def _one_at_a_time(build_dir: Path) -> Iterator[None]:
    """Holds a lock that dies with its holder, around torch's own that does not."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with _lock_around(build_dir).open("w") as file:
        if not _locks_soon(file.fileno()):
            _says[-1](f"waiting for another process that builds {build_dir.name}")
            fcntl.flock(file, fcntl.LOCK_EX)
        _building.add(build_dir)
        try:
            yield
        finally:
            _building.discard(build_dir)


def _locks_soon(descriptor: int) -> bool:
    """Locks a file unless another process holds its lock for longer than it takes to load an op; returns whether."""
    tried_until = time.monotonic() + _LOADING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > tried_until:
                return False
        time.sleep(_POLL_S)


class _BuilderDiedError(Exception):
    """The process that built an op was killed, and its lock is left."""


def wait_for_the_living() -> None:
    """Has torch's builder, in this process and its forks, wait for another's build only while that process lives.

    What a killed process has left unfinished is built by the one that has waited for it.
    """
    from torch.utils import cpp_extension
    from torch.utils.file_baton import FileBaton

    load = cpp_extension._jit_compile
    if hasattr(load, "__wrapped__"):
        return

    def load_or_build(*args: Any, **kwargs: Any) -> Any:
        """Stands in for `torch.utils.cpp_extension._jit_compile`."""
        while True:
            try:
                return load(*args, **kwargs)
            except _BuilderDiedError:
                continue

    def wait(baton: Any) -> None:
        """Waits as torch does, but not for a process that is dead."""
        build_dir = Path(baton.lock_file_path).parent
        _says[-1](f"waiting for another process that builds {build_dir.name}")
        while Path(baton.lock_file_path).exists():
            if clear_stale_lock(build_dir):
                raise _BuilderDiedError(f"the process that built {build_dir.name} was killed; try again")
            time.sleep(_POLL_S)

    FileBaton.wait = wait  # type: ignore[assignment, method-assign]
    load_or_build.__wrapped__ = load  # type: ignore[attr-defined]
    cpp_extension._jit_compile = load_or_build


@contextlib.contextmanager
def _told_of(note: Callable[[str], None]) -> Iterator[None]:
    """Tells, while this lasts, of each op that is built, before that takes its time."""
    from torch.utils import cpp_extension

    run = cpp_extension._run_ninja_build

    def run_and_tell(build_directory: str, *args: Any, **kwargs: Any) -> None:
        """Stands in for `torch.utils.cpp_extension._run_ninja_build`, which is called for an op that is built, too."""
        folder = Path(build_directory)
        if _has_work(folder):
            is_there = (folder / f"{folder.name}.so").exists()
            often = "again, for its flags or sources are others now" if is_there else "once on this machine"
            note(f"building DeepSpeed's {folder.name} ({often}; one to three minutes)")
        run(build_directory, *args, **kwargs)

    cpp_extension._run_ninja_build = run_and_tell
    _says.append(note)
    try:
        yield
    finally:
        _says.pop()
        cpp_extension._run_ninja_build = run


def _has_work(folder: Path) -> bool:
    """Returns whether there is something to build in a folder, as ninja sees it."""
    try:
        asked = subprocess.run(["ninja", "-n"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return True
    return b"no work to do" not in asked.stdout


def build(builders: Iterable[str], note: Callable[[str], None]) -> dict[str, str]:
    """Builds and loads DeepSpeed ops, where they are not built yet; minutes each, once per machine and version.

    Args:
        builders: names of DeepSpeed's op builders, such as `CPUAdamBuilder`.
        note: told what is being built, before it takes its time.

    Returns:
        For each op that cannot be built or loaded here, why.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    wait_for_the_living()
    cannot = {}
    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or builder.name == _NOT_THERE:
            cannot[name] = "this version of DeepSpeed has none for these devices"
            continue
        try:
            if why := _incompatible(builder):
                cannot[name] = why
                continue
            # It makes the folder, which may be nobody's to write.
            build_dir = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
            with _told_of(note), _one_at_a_time(build_dir):
                builder.load(verbose=False)
        except Exception as error:  # noqa: BLE001 - a missing compiler is the trial's to report, with its own words
            cannot[name] = [*str(error).splitlines(), type(error).__name__][0]
            note(f"DeepSpeed's {builder.name} cannot be built: {cannot[name]}")
    return cannot


def _incompatible(builder: Any) -> str:
    """Returns why DeepSpeed takes an op for one that cannot be built here; empty where it can."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        if builder.is_compatible(verbose=True):
            return ""
    words = " ".join(_COLOUR.sub("", said.getvalue()).replace("[WARNING]", "").split())
    return words or "DeepSpeed does not say why"


def main(arguments: list[str]) -> None:
    """Builds the named ops; what it does goes to standard error, or as JSON, a line each, where it is told to.

    Args:
        arguments: the builders' names; before them, perhaps, `--report` and a file descriptor.
    """
    if arguments[:1] != ["--report"]:
        build(arguments, note=_to_log)
        return
    with os.fdopen(int(arguments[1]), "w", buffering=1, encoding="utf-8") as report:
        cannot = build(arguments[2:], note=lambda text: print(json.dumps({"note": text}), file=report))
        print(json.dumps({"cannot": cannot}), file=report)
