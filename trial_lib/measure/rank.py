"""One rank of a trial: prepares the process, puts the probe in place, runs the user's program."""

import atexit
import json
import os
import platform
import resource
import runpy
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from trial_lib.experiment.files import write_whole
from trial_lib.experiment.window import StepWindow

_INITIALIZE_FRAME = ("trial_lib/measure/probe.py", "initialize")


def run(payload: dict[str, Any], rank: int) -> None:
    """Runs one rank; it ends the process and does not return.

    Args:
        payload: the trial as the driver describes it: `program` (`{"script": path}` or `{"module": name}`),
            `arguments`, `passes_local_rank`, `model_dir`, `overrides`, `window`, `memory_limit`, `with_profile`,
            `launched_at` (seconds since the epoch), and `measurements` and `failures`, the records' paths by rank.
        rank: this rank.
    """
    phases = {"start": max(0.0, time.time() - payload["launched_at"])}

    def finish(measurement: dict[str, Any]) -> None:
        measurement["versions"] = _versions()
        measurement["host"] = platform.node()
        if payload["with_profile"] and rank == 0:
            measurement["imported"] = _imported(Path(payload["model_dir"]))
        write_whole(Path(payload["measurements"][rank]), json.dumps(measurement))
        # A rank that ends alone (its loss diverged, say) would leave the others waiting for it: the guard ends those.
        _end(0 if measurement["outcome"] == "completed" else 1)

    try:
        # Inside: a rank of a broken environment has to leave a record too.
        from trial_lib.measure.probe import Probe, ProbeSettings

        probe = Probe(
            ProbeSettings(
                overrides=payload["overrides"],
                window=StepWindow(**payload["window"]),
                memory_limit=payload["memory_limit"],
                with_profile=payload["with_profile"],
            ),
            phases,
            finish,
        )
        probe.install()
        try:
            _run_program(payload["program"], _arguments(payload))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        if not probe.finish_early():
            raise _EndedEarlyError(_ended_early_reason(probe.has_engine, probe.steps_seen))
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        _fail(payload, rank, phases, error)


def train(payload: dict[str, Any], rank: int) -> None:
    """Runs one rank of a full experiment: the user's program as it is, to its own end; it does not return.

    Args:
        payload: `program`, `arguments` and `passes_local_rank`, as for `run`, and `finished` and `failures`, the
            records' paths by rank.
        rank: this rank.
    """
    try:
        try:
            _run_program(payload["program"], _arguments(payload))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        # As the interpreter does: a checkpoint may still be written in a thread.
        threading._shutdown()  # type: ignore[attr-defined]
        write_whole(Path(payload["finished"][rank]), json.dumps({"outcome": "completed", "time": time.time()}))
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        _fail(payload, rank, {}, error)
    # What runs at exit does; the interpreter's own end does not: gloo's threads, which may still hold tensors of the
    # last step, abort there now and then. A status other than 0 would have the guard end the ranks that still save.
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the program has returned: the training has ended well
        traceback.print_exc()
    _end(0)


def _arguments(payload: dict[str, Any]) -> list[str]:
    local_rank = [f"--local_rank={os.environ['LOCAL_RANK']}"] if payload["passes_local_rank"] else []
    return [*local_rank, *payload["arguments"]]


class _EndedEarlyError(Exception):
    """The program ended before enough steps were measured."""


def _ended_early_reason(has_engine: bool, steps: int) -> str:
    if not has_engine:
        return "The program ended without calling deepspeed.initialize."
    return f"The program ended after {steps} optimizer steps, before enough of them were measured: let it train longer."


def _run_program(program: dict[str, str], arguments: list[str]) -> None:
    """Runs the user's script or module as `python` would, as `__main__`, with its own folder first on the path."""
    if "module" in program:
        sys.argv = [program["module"], *arguments]
        sys.path.insert(0, str(Path.cwd()))
        runpy.run_module(program["module"], run_name="__main__", alter_sys=True)
    else:
        script = program["script"]
        sys.argv = [script, *arguments]
        sys.path.insert(0, str(Path(script).resolve().parent))
        runpy.run_path(script, run_name="__main__")


def _fail(payload: dict[str, Any], rank: int, phases: dict[str, float], error: BaseException) -> None:
    """Leaves the exception in the log, as Python would, and in a record that needs no parsing."""
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    # A rank that ran into its memory limit must still be able to say so.
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
    trace = "".join(traceback.format_exception(type(error), error, error.__traceback__))
    print(trace, file=sys.stderr, flush=True)
    frames = [(frame.f_code.co_filename, frame.f_code.co_name) for frame, _ in traceback.walk_tb(error.__traceback__)]
    record = {
        "type": type(error).__name__,
        "message": str(error),
        "traceback": trace[-8000:],
        "in_initialize": any(
            file.endswith(_INITIALIZE_FRAME[0]) and name == _INITIALIZE_FRAME[1] for file, name in frames
        ),
        "ended_early": isinstance(error, _EndedEarlyError),
        "time": time.time(),
        "phases": phases,
    }
    write_whole(Path(payload["failures"][rank]), json.dumps(record))
    _end(1)


def _end(code: int) -> None:
    """Ends the process at once: no code of the user's, no destructor and no other rank can hold it up."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _versions() -> dict[str, str]:
    import deepspeed
    import torch

    versions = {"python": platform.python_version(), "torch": torch.__version__, "deepspeed": deepspeed.__version__}
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    return versions


def _imported(model_dir: Path) -> list[str]:
    """Returns the modules that this rank imported from outside the model directory, in the order of their import."""
    own = (str(model_dir.resolve()) + os.sep, str(Path(__file__).resolve().parents[1]) + os.sep)
    names = []
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if name != "__main__" and isinstance(file, str) and not file.startswith(own):
            names.append(name)
    return names
