"""DeepSpeed's just-in-time builds, ahead of any deadline, and the locks that a killed build leaves behind.

Runs in the user's environment.
"""

import contextlib
import fcntl
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

_POLL_S = 0.2


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


def clear_stale_lock(build_dir: Path) -> bool:
    """Removes the lock of a build that was killed; every later build would wait for it for ever.

    Returns:
        Whether there was one.
    """
    lock = build_dir / "lock"
    if not lock.exists() or holds_open(lock):
        return False
    lock.unlink(missing_ok=True)
    return True


@contextlib.contextmanager
def _one_at_a_time(build_dir: Path) -> Iterator[None]:
    """Holds a lock that dies with its holder, around torch's own that does not."""
    build_dir.mkdir(parents=True, exist_ok=True)
    with (build_dir.parent / f".{build_dir.name}.zerotune.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def build(builders: Iterable[str], note: Callable[[str], None]) -> None:
    """Builds and loads DeepSpeed ops, where they are not built yet; minutes each, once per machine and version.

    Args:
        builders: names of DeepSpeed's op builders, such as `CPUAdamBuilder`.
        note: told what is being built, before it takes its time.
    """
    from deepspeed.accelerator import get_accelerator
    from torch.utils.cpp_extension import _get_build_directory

    for name in builders:
        builder = get_accelerator().create_op_builder(name)
        if builder is None or not builder.is_compatible(verbose=False):
            continue
        build_dir = Path(_get_build_directory(builder.name, verbose=False))
        with _one_at_a_time(build_dir):
            while (build_dir / "lock").exists() and not clear_stale_lock(build_dir):
                time.sleep(_POLL_S)
            if not (build_dir / f"{builder.name}.so").exists():
                note(f"building DeepSpeed's {builder.name} (once on this machine, one to three minutes)")
            try:
                builder.load(verbose=False)
            except Exception as error:  # noqa: BLE001 - a missing compiler is the trial's to report, with its own words
                note(f"DeepSpeed's {builder.name} cannot be built: {str(error).splitlines()[0]}")


def main(arguments: list[str]) -> None:
    """Builds the named ops; what it does goes to standard error."""
    build(arguments, note=lambda text: print(text, file=sys.stderr, flush=True))
