"""The records that a rank leaves for its driver, and its end."""

import contextlib
import json
import os
import platform
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.folders import read_layer
from zerotune.trial_lib.messages.measurement import Import, Measurement, RankFailure
from zerotune.trial_lib.messages.orders import RankOrder, SizeOrder, installed_folders
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.endings import EndedEarlyError, WaitsForEverError, named_refusal
from zerotune.trial_lib.rank.rank_placement import PLACE
from zerotune.trial_lib.rank.redirects import NotedMemory
from zerotune.trial_lib.rank.user_program import say, shortened, text_of, without_own_frames

# What a rank imports, for a fork server that is to have imported it before its forks.


class ImportedModules:
    """The modules that a program imports, and the environment variables that it sets before.

    A library may read a variable when it is imported, such as `HF_HOME`. The server then has to import it with the
    program's value.
    """

    def __init__(self) -> None:
        self._environment: dict[str, str] = {}
        self._encoded: dict[Any, Any] = {}
        self._changes: list[tuple[frozenset[str], dict[str, str | None]]] = []

    def follow(self) -> None:
        self._environment = dict(os.environ)
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        # Finds no module. Python calls this before an import.
        if name.partition(".")[0] not in sys.stdlib_module_names:
            # Another thread may change the environment meanwhile. The next import shows it.
            with contextlib.suppress(KeyError, RuntimeError):
                self._look()

    def _look(self) -> None:
        # To compare the encoded values takes some microseconds, and a program has thousands of imports.
        encoded = dict(getattr(os.environ, "_data", os.environ))
        if encoded != self._encoded:
            self._encoded = encoded
            before, now = self._environment, dict(os.environ)
            names = sorted(before.keys() | now.keys())
            changed = {name: now.get(name) for name in names if before.get(name) != now.get(name) and name not in PLACE}
            self._environment = now
            if changed:
                self._changes.append((frozenset(sys.modules), changed))

    def found(self) -> list[Import]:
        """The installed modules that are imported by now, in order.

        The user's own modules are left out: they may read the rank or a mapped variable at import. So are variables
        that look like secrets, because the list is kept.
        """
        found: list[Import] = []
        changes = list(self._changes)
        for name in _installed():
            while changes and name not in changes[0][0]:
                shown = {name: value for name, value in changes.pop(0)[1].items() if _is_shown(name, value)}
                found += [shown] if shown else []
            found.append(name)
        return found


def _is_shown(name: str, value: str | None) -> bool:
    return redact({name: value})[name] == value and (value is None or value.isprintable())


def _installed() -> list[str]:
    installed = installed_folders()
    ours = f"{Path(__file__).absolute().parents[1]}{os.sep}"
    files = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return [
        name
        for name, file in files
        if name != "__main__" and isinstance(file, str) and file.startswith(installed) and not file.startswith(ours)
    ]


# Libraries of the user's in which a training may spend its time.
_ALSO_DECIDE_SPEED = ("accelerate", "bitsandbytes", "flash-attn", "peft", "transformers", "triton", "xformers")


def versions_here() -> dict[str, str]:
    """Versions of Python, torch, DeepSpeed and what else decides the speed of this process's program."""
    import deepspeed
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    for package in _ALSO_DECIDE_SPEED:
        with contextlib.suppress(PackageNotFoundError):
            versions[package] = version(package)
    return versions


# In a trial the program sees a replacement of it.
_exit_now = os._exit
_INITIALIZE_FRAME = ("trial_lib/rank/interception.py", "initialize")


class RankRecords:
    """Writes the records of one rank of a trial, and ends the rank."""

    def __init__(self, order: RankOrder, rank: int) -> None:
        scratch = Path(order.scratch)
        layer = read_layer(scratch)
        self._rank = rank
        self._as_recorded: Callable[[str], str] = str if layer is None else layer.as_recorded
        self._memory = NotedMemory(scratch)
        self.imports = ImportedModules()

    def write(self, measurement: Measurement, size: SizeOrder, files: str) -> None:
        """`files`: how the user's files are protected."""
        imported = self.imports.found() if size.with_profile and self._rank == 0 else []
        measurement = replace(
            measurement,
            versions=versions_here(),
            trained_on=device.found(),
            host=platform.node(),
            files=files,
            imported=imported,
        )
        write_whole(Path(size.measurements[self._rank]), self._as_recorded(json.dumps(asdict(measurement))))

    def fail(self, error: BaseException, size: SizeOrder, phases: dict[str, float]) -> NoReturn:
        self._memory.note_held()
        has_engine = Path(size.engine_built[self._rank]).exists()
        fail(Path(size.failures[self._rank]), phases, error, has_engine, self._as_recorded)

    def end(self, code: int) -> NoReturn:
        self._memory.note_held()
        end_now(code)


def fail(
    file: Path,
    phases: dict[str, float],
    error: BaseException,
    engine_built: bool,
    as_recorded: Callable[[str], str] = str,
) -> NoReturn:
    """Prints the exception to the log, as Python would, writes it to a record that needs no parsing, and ends."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    left = _left_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # A rank that has reached its memory limit needs memory to write its record.
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    frames = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    failure = RankFailure(
        type=type(error).__name__,
        message=shortened(str(error)),
        traceback=text_of(without_own_frames(error)),
        in_initialize=any(
            file.endswith(_INITIALIZE_FRAME[0]) and name == _INITIALIZE_FRAME[1] for file, name in frames
        ),
        refusal=named_refusal(error),
        ended_early=isinstance(error, EndedEarlyError),
        waits=isinstance(error, WaitsForEverError),
        elsewhere=isinstance(error, device.OtherDeviceError),
        memory=left,
        engine_built=engine_built,
        time=time.time(),
        phases=phases,
    )
    write_whole(file, as_recorded(json.dumps(asdict(failure))))
    if failure.ended_early or failure.waits:
        error = SystemExit(str(error))
    say(error)
    end_now(1)


def _left_bytes() -> dict[str, int]:
    # The memory that the rank has left, if it can still find out. It decides cases that the error does not.
    with contextlib.suppress(BaseException):
        return device.device_in_use().left_bytes()
    return {}


def end_now(code: int) -> NoReturn:
    """Ends the process at once. No code of the user's, no destructor and no other rank can delay it."""
    for stream in (sys.stdout, sys.stderr):
        # The program may have closed or replaced it.
        with contextlib.suppress(BaseException):
            stream.flush()
    _exit_now(code)
