"""One rank of a trial: prepares the process, installs the probe, and runs the user's program."""

import atexit
import contextlib
import json
import os
import platform
import resource
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NoReturn

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.folders import read_layer
from zerotune.trial_lib.messages.orders import NextSize, RankOrder, SizeOrder, TrainingOrder
from zerotune.trial_lib.messages.turned import settings_of
from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.endings import EndedEarlyError, WaitsForEverError, named_refusal
from zerotune.trial_lib.rank.imported_modules import ImportedModules
from zerotune.trial_lib.rank.redirects import NotedMemory, note_builds, swap_into_own_folder
from zerotune.trial_lib.rank.user_program import run_program, say, shortened, text_of, without_own_frames

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


def run(payload: Mapping[str, Any], rank: int) -> None:
    """Runs a rank of a trial, or of a sweep, by a `RankOrder` as JSON. It ends the process and does not return."""
    order = RankOrder.from_json(payload)
    process = os.getpid()
    sizes: Any = None
    imports = ImportedModules()
    scratch = Path(order.scratch)
    layer = read_layer(scratch)
    as_recorded = str if layer is None else layer.as_recorded
    memory = NotedMemory(scratch)
    # Later sizes find the ops loaded, so the first folder has all builds.
    note_builds(scratch)
    swap_into_own_folder(scratch)

    # What the sizes call when they are measured, or fail

    def end(code: int) -> NoReturn:
        memory.note_held()
        _end(code)

    def record(size: SizeOrder, measurement: dict[str, Any]) -> None:
        measurement["versions"] = versions_here()
        measurement["trained_on"] = device.found()
        measurement["host"] = platform.node()
        measurement["files"] = sizes.way_of_files
        if size.with_profile and rank == 0:
            measurement["imported"] = imports.found()
        write_whole(Path(size.measurements[rank]), as_recorded(json.dumps(measurement)))

    def fail(error: BaseException) -> None:
        size = order.sizes[0] if sizes is None else sizes.size
        phases = {} if sizes is None else sizes.phases
        memory.note_held()
        _fail(Path(size.failures[rank]), phases, error, Path(size.engine_built[rank]).exists(), as_recorded)

    try:
        # The import is inside, because a rank of a broken environment has to leave a record too.
        from zerotune.trial_lib.rank.sizes import Sizes

        device.expect(order.device)
        sizes = Sizes(order, rank, record, fail, end)
        sizes.install()
        if rank == 0 and order.sizes[0].with_profile:
            imports.follow()
        while _run_program(order, sizes, process):
            sizes.start_over()
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        if os.getpid() == process:
            fail(error)
        _end_child(error)
    _end_child(None)


def _run_program(order: RankOrder, sizes: Any, process: int) -> bool:
    # Runs the program once; returns whether it has to run again, with the next size.
    try:
        try:
            run_program(order.program, _arguments(order, sizes.size.arguments))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        if os.getpid() == process and not sizes.is_between:
            main = threading.main_thread()
            has_trained_here = sizes.probe.steps_seen > 0 and sizes.probe.thread is main
            if not has_trained_here and any(not each.daemon for each in threading.enumerate() if each is not main):
                # The interpreter does the same at its end, because the training may run in a thread. No executor works
                # afterwards.
                sizes.is_last_run = True
                threading._shutdown()  # type: ignore[attr-defined]
            sizes.closing.by_itself()
    except BaseException as error:
        if os.getpid() == process and not sizes.is_between and not isinstance(error, EndedEarlyError):
            with contextlib.suppress(NextSize):
                sizes.closing.after(error)
        # The size is measured, so the way in which the program has ended does not matter.
        if os.getpid() != process or not sizes.is_between:
            raise
    return os.getpid() == process


def _end_child(error: BaseException | None) -> None:
    # Ends a child that the program has forked, as Python would. A child is not the rank, and leaves no record.
    code = 0 if error is None else 1
    if error is not None:
        say(without_own_frames(error))
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    _end(code)


def train(payload: Mapping[str, Any], rank: int) -> None:
    """Runs a rank of a full experiment, to the program's own end, by a `TrainingOrder` as JSON. It does not return."""
    order = TrainingOrder.from_json(payload)
    try:
        from zerotune.trial_lib.rank import accelerate, huggingface_trainer, interception, patching, torch_functions

        device.expect(order.device)
        huggingface_trainer.adopt(order.ds_config, order.is_in_code)
        interception.adopt_zero_init(order.ds_config, order.is_in_code)
        torch_functions.install_loaders(lambda: settings_of("loader", order.turned))
        torch_functions.install_fused_adam(lambda: settings_of("optimizer", order.turned))
        if order.is_in_code:
            interception.adopt(order.ds_config, order.turned)
            accelerate.adopt()
        else:
            patching.when_imported("deepspeed", lambda deepspeed: interception.let_config_count(order.turned))
        try:
            run_program(order.program, _arguments(order, order.arguments))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        # The interpreter does the same at its end, because a thread may still write a checkpoint.
        threading._shutdown()  # type: ignore[attr-defined]
        write_whole(Path(order.finished[rank]), json.dumps({"outcome": "completed", "time": time.time()}))
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        _fail(Path(order.failures[rank]), {}, error, engine_built=True)
    # The exit functions run, and the interpreter's own end does not. gloo's threads may still hold tensors of the last
    # step, and sometimes abort there. With another status than 0, the guard would end ranks that still save.
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the program has returned: the training has ended well
        traceback.print_exc()
    _end(0)


def _arguments(order: RankOrder | TrainingOrder, arguments: list[str]) -> list[str]:
    option = order.local_rank_option
    return [f"{option}={os.environ['LOCAL_RANK']}", *arguments] if option else arguments


def _fail(
    file: Path,
    phases: dict[str, float],
    error: BaseException,
    engine_built: bool,
    as_recorded: Callable[[str], str] = str,
) -> None:
    # Prints the exception to the log, as Python would, and writes it to a record that needs no parsing.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    left = _left_bytes()
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # A rank that has reached its memory limit needs memory to write its record.
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    frames = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    record = {
        "type": type(error).__name__,
        "message": shortened(str(error)),
        "traceback": text_of(without_own_frames(error)),
        "in_initialize": any(
            file.endswith(_INITIALIZE_FRAME[0]) and name == _INITIALIZE_FRAME[1] for file, name in frames
        ),
        "refusal": named_refusal(error),
        "ended_early": isinstance(error, EndedEarlyError),
        "waits": isinstance(error, WaitsForEverError),
        "elsewhere": isinstance(error, device.OtherDeviceError),
        "memory": left,
        "engine_built": engine_built,
        "time": time.time(),
        "phases": phases,
    }
    write_whole(file, as_recorded(json.dumps(record)))
    if record["ended_early"] or record["waits"]:
        error = SystemExit(str(error))
    say(error)
    _end(1)


def _left_bytes() -> dict[str, int]:
    # The memory that the rank has left, if it can still find out. It decides cases that the error does not.
    with contextlib.suppress(BaseException):
        return device.device_in_use().left_bytes()
    return {}


def _end(code: int) -> NoReturn:
    # Ends the process at once. No code of the user's, no destructor and no other rank can delay it.
    for stream in (sys.stdout, sys.stderr):
        # The program may have closed or replaced it.
        with contextlib.suppress(BaseException):
            stream.flush()
    _exit_now(code)
