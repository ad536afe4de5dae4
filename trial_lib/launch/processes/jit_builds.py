"""Runs DeepSpeed's just-in-time builds outside of any deadline, and clears the locks of killed builds."""

import contextlib
import errno
import fcntl
import io
import json
import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from zerotune.trial_lib.device.cuda_variables import unread_architectures
from zerotune.trial_lib.messages.build_times import has_work

NAMED = "TORCH_EXTENSIONS_DIR"
"""The variable that names the folder of torch's builds. A user may set it."""

OWN = "zerotune-"
"""ZeroTune's folders for builds begin with this."""

_POLL_S = 0.2
_ASIDE = ".building-"
_LOADING_S = 1.0  # the longest time to load a built op
_HELD = (errno.EAGAIN, errno.EACCES)  # flock's errors if another process has the lock
_REMOVAL_S = 0.1  # the longest time from closing a lock to removing it
# DeepSpeed has a function of this name for an op that does not exist on a CPU.
_NOT_THERE = "deepspeed_not_implemented"
_COLOUR = re.compile(r"\x1b\[\d+m")
_building: set[Path] = set()  # the folders in which this process builds


def _to_log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


_says: list[Callable[[str], None]] = [_to_log]  # the last one is called with what this process waits for


def holds_open(path: Path) -> bool:
    """Returns whether any process has `path` open. torch's builder keeps its lock file open while it builds."""
    wanted = path.resolve()
    for descriptors in Path("/proc").glob("[0-9]*/fd"):
        with contextlib.suppress(OSError):
            for link in descriptors.iterdir():
                with contextlib.suppress(OSError):
                    if link.readlink() == wanted:
                        return True
    return False


def is_stale(lock: Path) -> bool:
    """Returns whether a lock is left of a killed build. Every later build would wait for it forever.

    Another user's lock is not stale, because its holder cannot be seen. Neither is the lock of a build by ZeroTune on
    another host, or in another container, that shares the folder.
    """
    try:
        own = lock.stat().st_uid == os.getuid()
    except (FileNotFoundError, NotADirectoryError):
        return False
    return own and not _builds_elsewhere(lock.parent) and not holds_open(lock)


def _builds_elsewhere(build_dir: Path) -> bool:
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
    """Removes the lock of a killed build. Returns whether there was one."""
    lock = build_dir / "lock"
    if not is_stale(lock):
        return False
    # A builder closes its lock before it removes it, perhaps while the open files were being listed.
    time.sleep(_REMOVAL_S)
    try:
        if not is_stale(lock):
            return False
        lock.unlink()
    except FileNotFoundError:
        return False
    return True


def build_folders(environment: Mapping[str, str]) -> list[Path]:
    """Returns the folders in which torch builds extensions, one for each."""
    root = environment.get(NAMED)
    home = os.path.expanduser("~")  # noqa: PTH111 - Path's own raises where there is no home
    usual = Path(home, ".cache", "torch_extensions").glob("*/*")
    if root and not Path(root).name.startswith(OWN):
        return list(Path(root).glob("*"))
    return list(dict.fromkeys([*(Path(root).glob("*") if root else ()), *usual]))


def clear_stale_locks(environment: Mapping[str, str]) -> None:
    """Removes every lock of a killed process. A rank that is killed while it loads an op leaves a lock too."""
    for folder in build_folders(environment):
        clear_stale_lock(folder)


@contextlib.contextmanager
def _one_at_a_time(build_dir: Path) -> Iterator[None]:
    # Holds a lock around torch's. This lock goes with its holder, and torch's does not.
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
    # Locks a file, unless another process holds the lock for longer than a load takes. Returns whether.
    tried_until = time.monotonic() + _LOADING_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except OSError as error:
            if error.errno not in _HELD or time.monotonic() > tried_until:
                return False
        time.sleep(_POLL_S)


class _NotBuiltError(Exception):
    """An op is not built, and is not to be built now."""


class _BuilderDiedError(Exception):
    """The process that built an op was killed and has left its lock."""


def wait_for_the_living() -> None:
    """Has torch's builder, in this process and its forks, wait for another build only while its process lives.

    If that process is killed, the process that waited builds the op.
    """
    from torch.utils import cpp_extension
    from torch.utils.file_baton import FileBaton

    load = cpp_extension._jit_compile
    if FileBaton.wait.__module__ == __name__:
        return

    def load_or_build(*args: Any, **kwargs: Any) -> Any:
        while True:
            try:
                return load(*args, **kwargs)
            except _BuilderDiedError:
                # torch takes the op for built by this process already.
                cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(str(args[0] if args else kwargs["name"]), None)

    def wait(baton: Any) -> None:
        build_dir = Path(baton.lock_file_path).parent
        _says[-1](f"waiting for another process that builds {build_dir.name}")
        while Path(baton.lock_file_path).exists():
            if clear_stale_lock(build_dir):
                raise _BuilderDiedError(f"the process that built {build_dir.name} was killed; try again")
            time.sleep(_POLL_S)

    FileBaton.wait = wait  # type: ignore[assignment, method-assign]
    cpp_extension._jit_compile = load_or_build


@contextlib.contextmanager
def _reporting(note: Callable[[str], None], only_built: bool) -> Iterator[None]:
    # Reports, in this block, each op before it is built. Or refuses to build it.
    from torch.utils import cpp_extension

    run = cpp_extension._run_ninja_build

    def run_and_tell(build_directory: str, *args: Any, **kwargs: Any) -> None:
        """Stands in for `torch.utils.cpp_extension._run_ninja_build`, which torch also calls for built ops."""
        folder = Path(build_directory)
        if not has_work(folder):
            run(build_directory, *args, **kwargs)
            return
        if only_built:
            raise _NotBuiltError
        is_there = (folder / f"{folder.name}.so").exists()
        often = "again, for its flags or sources are others now" if is_there else "once for this environment"
        note(f"building DeepSpeed's {folder.name} ({often}; one to three minutes)")
        _build_aside(folder, lambda aside: run(str(aside), *args, **kwargs))

    cpp_extension._run_ninja_build = run_and_tell
    _says.append(note)
    try:
        yield
    finally:
        _says.pop()
        cpp_extension._run_ninja_build = run


def _build_aside(folder: Path, run: Callable[[Path], None]) -> None:
    # Builds in a folder of this build's own, and then moves everything in place. If this process is killed, its
    # compilers may still write. They hit no other build, and nothing half is in place.
    for left in folder.glob(f"{_ASIDE}*"):
        shutil.rmtree(left, ignore_errors=True)
    with tempfile.TemporaryDirectory(prefix=_ASIDE, dir=folder, ignore_cleanup_errors=True) as name:
        aside = Path(name)
        shutil.copy2(folder / "build.ninja", aside)
        run(aside)
        # Ninja's log last. Without it ninja takes everything for outdated.
        for file in sorted(aside.iterdir(), key=lambda file: file.name.startswith(".")):
            file.replace(folder / file.name)


def _torchs_own_root() -> Path | None:
    # The folder that torch would build in if ZeroTune had not named one. None if ZeroTune has not.
    from torch.utils import cpp_extension

    root = os.environ.get(NAMED, "")
    if not Path(root).name.startswith(OWN):
        return None
    del os.environ[NAMED]
    try:
        return Path(cpp_extension._get_build_directory(".", verbose=False))
    except OSError:
        return None
    finally:
        os.environ[NAMED] = root


def _copy_build(folder: Path, root: Path) -> None:
    # Copies a built extension to another root, unless there is one. Times stay, so ninja finds nothing to do.
    there = root / folder.name
    is_whole = (folder / f"{folder.name}.so").exists() and not (folder / "lock").exists()
    if not is_whole or (there / "build.ninja").exists():
        return
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(prefix=_ASIDE, dir=root) as aside:
        copy = Path(aside, folder.name)
        shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(f"{_ASIDE}*"))
        with contextlib.suppress(OSError):
            # torch makes it before it builds.
            there.rmdir()
        copy.rename(there)


def build(builders: Iterable[str], note: Callable[[str], None], only_built: bool = False) -> dict[str, str]:
    """Builds and loads DeepSpeed's ops. A build takes minutes, once for each environment.

    Returns the reason for each op that cannot be built or loaded here. An op that is not to be built has no words.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils import cpp_extension

    wait_for_the_living()
    usual = _torchs_own_root()
    if usual is not None:
        own = Path(os.environ[NAMED])
        own.mkdir(parents=True, exist_ok=True)
        for folder in usual.iterdir():
            _copy_build(folder, own)
    cannot = {}
    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or builder.name == _NOT_THERE:
            cannot[name] = "this version of DeepSpeed has none for these devices"
            continue
        try:
            can_build, words = compatibility(builder)
            if not can_build:
                cannot[name] = " ".join(words.replace("[WARNING]", "").split()) or "DeepSpeed does not say why"
                continue
            # torch makes the folder, and may not have the right to.
            build_dir = Path(cpp_extension._get_build_directory(builder.name, verbose=False))
            with _reporting(note, only_built), _one_at_a_time(build_dir):
                builder.load(verbose=False)
                if usual is not None:
                    _copy_build(build_dir, usual)
        except _NotBuiltError:
            cannot[name] = ""
            # Forks of this process may still build it.
            cpp_extension.JIT_EXTENSION_VERSIONER.entries.pop(builder.name, None)
        except Exception as error:  # noqa: BLE001 - a missing compiler is the trial's to report, with its own words
            unread = unread_architectures(os.environ) if isinstance(error, ValueError) else ""
            cannot[name] = unread or [*str(error).splitlines(), type(error).__name__][0]
            note(f"DeepSpeed's {builder.name} cannot be built: {cannot[name]}")
    return cannot


def compatibility(builder: Any) -> tuple[bool, str]:
    """Returns whether an op can be built here, and what DeepSpeed prints about that."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        can_build = bool(builder.is_compatible(verbose=True))
    return can_build, " ".join(_COLOUR.sub("", printed.getvalue()).split())


def main(arguments: list[str]) -> None:
    """Builds the named ops. It reports to standard error, or in JSON to the descriptor behind `--report`."""
    if arguments[:1] != ["--report"]:
        build(arguments, note=_to_log)
        return
    with os.fdopen(int(arguments[1]), "w", buffering=1, encoding="utf-8") as report:
        cannot = build(arguments[2:], note=lambda text: print(json.dumps({"note": text}), file=report))
        print(json.dumps({"cannot": cannot}), file=report)
