"""Checks what a rank needs to train: devices and driver, torch and DeepSpeed, and the tools that build its ops."""

import contextlib
import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_lib.device.gpu_architectures import unread_architectures
from trial_lib.device.host.this_host import kind_of
from trial_lib.doctor.check import Check, fail, ok, warn
from trial_lib.doctor.devices import DevicesFound
from trial_lib.launch.processes import bootstrap
from trial_lib.launch.processes.jit_builds import build_folders, is_stale
from trial_lib.wire.errors import InputError

_REPORT_S = 60.0
_KILLED_S = 2.0
ENVIRONMENT, OPS, LOCKS, COMPILER = "environment", "ops", "build locks", "compiler"


def environment_report(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Returns the report of `trial_lib.launch.processes.environment_report`, or a sentence on why there is none."""
    try:
        text, last = _ask("trial_lib.launch.processes.environment_report", interpreter, environment)
    except TimeoutError:
        return f"importing torch and DeepSpeed has not ended within {_REPORT_S:.0f} s"
    if not text:
        return f"torch and DeepSpeed cannot be imported: {last}"
    report: dict[str, Any] = json.loads(text)
    return report


def devices() -> DevicesFound:
    """Returns the devices that this process may use, and their state.

    Raises:
        InputError: a driver does not answer, or the host has devices that ZeroTune does not tune on.
    """
    where = "the NVIDIA driver"
    try:
        text, last = _ask("trial_lib.doctor.host_report", sys.executable, os.environ)
    except TimeoutError:
        what = f"it has not listed the GPUs within {_REPORT_S:.0f} s."
        raise InputError(what, where=where, remedy="See whether `nvidia-smi` hangs; if so, restart the host.") from None
    if not text:
        raise InputError(f"asking it has failed ({last}).", where=where, remedy="See what `nvidia-smi` says.")
    found = json.loads(text)
    if "error" in found:
        raise InputError(**found["error"])
    return DevicesFound.of_json(found)


def tried_devices(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Returns the report of `trial_lib.launch.processes.tried_devices`, or a sentence on why there is none."""
    try:
        text, last = _ask("trial_lib.launch.processes.tried_devices", interpreter, environment)
    except TimeoutError:
        return f"it has not ended within {_REPORT_S:.0f} s"
    if not text:
        return last
    tried: dict[str, Any] = json.loads(text)
    return tried


def _ask(module: str, interpreter: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns the output of a module in its own process, empty if it fails, and the last line of its errors.

    Raises:
        TimeoutError: it has not ended within a minute.
    """
    listen, tell = os.pipe()
    with os.fdopen(listen, encoding="utf-8") as answer:
        process = subprocess.Popen(
            bootstrap.command(interpreter, module, str(tell)),
            pass_fds=[tell],
            env=dict(environment),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        os.close(tell)
        try:
            _, said = process.communicate(timeout=_REPORT_S)
        except subprocess.TimeoutExpired:
            process.kill()
            # A process that hangs in the kernel dies when the driver releases it, if ever. The doctor does not wait for
            # it.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_KILLED_S)
            raise TimeoutError from None
        text = answer.read()
    last = said.strip().splitlines() or [f"it ended with {process.returncode}"]
    return text if process.returncode == 0 else "", last[-1]


def check_environment(interpreter: str, report: Mapping[str, Any] | str) -> Check:
    """Checks whether torch and DeepSpeed can be imported."""
    if isinstance(report, str):
        return fail(
            ENVIRONMENT, f"{interpreter}: {report}", "Run that import by hand, and mend the error that it shows."
        )
    device = f"DeepSpeed {report['deepspeed']} on {report['accelerator']}"
    return ok(ENVIRONMENT, f"{interpreter}: Python {report['python']}, torch {report['torch']}, {device}")


def check_ops(report: Mapping[str, Any] | str, wanted: Sequence[str]) -> Check:
    """Checks which of DeepSpeed's ops are built, and which can be.

    Args:
        report: `environment_report`'s.
        wanted: the ops that studies commonly need.
    """
    if isinstance(report, str):
        return warn(OPS, "not known: DeepSpeed could not be asked", f"Mend `{ENVIRONMENT}` first.")
    ops = report["ops"]
    built = [name for name, op in ops.items() if op["built"]]
    can = [name for name, op in ops.items() if op["can_build"] and not op["built"]]
    cannot = {name: op["why"] or _SILENT for name, op in ops.items() if not op["can_build"] and not op["built"]}
    reasons = [f"{name} ({_first(why)})" for name, why in cannot.items()]
    said = f"built: {_names(built)}; can be built: {_names(can)}; cannot: {_names(reasons)}"
    missing = [name for name in wanted if name in cannot]
    if missing:
        return fail(OPS, said, "; ".join(f"{name}: {cannot[name]}" for name in missing))
    later = [name for name in wanted if name in can]
    if later:
        return warn(
            OPS, said, f"The first study that needs one waits minutes for it. Build {_names(later)} ahead: {_AHEAD}."
        )
    return ok(OPS, said)


_AHEAD = "python -m flows.prepare"
_SILENT = "DeepSpeed does not say why"


def _names(names: Sequence[str]) -> str:
    return ", ".join(names) or "none"


def _first(why: str) -> str:
    """Returns DeepSpeed's first sentence. Hints follow it."""
    return next(filter(None, (part.strip(" .") for part in why.split("[WARNING]"))), why)


def check_locks(environment: Mapping[str, str]) -> Check:
    """Looks for locks of killed builds. Every later process would wait for them silently."""
    stale = [folder / "lock" for folder in build_folders(environment) if is_stale(folder / "lock")]
    if not stale:
        return ok(LOCKS, "none that a killed build has left")
    remedy = shlex.join(["rm", *map(str, stale)])
    return fail(LOCKS, f"{len(stale)} from a killed build: every process that needs the op waits forever", remedy)


def check_compiler(environment: Mapping[str, str], device: str, report: Mapping[str, Any] | str) -> Check:
    """Looks for the tools that build DeepSpeed's ops: a C++ compiler, ninja, and the devices' compiler."""
    path = environment.get("PATH", "")
    compiler = shutil.which(environment.get("CXX", "c++"), path=path)
    ninja = shutil.which("ninja", path=path)
    found = [tool for tool in (compiler, ninja) if tool]
    if ninja is None:
        said = "no ninja in PATH: even a built op cannot be loaded"
        return fail(COMPILER, said, "Activate ZeroTune's environment (it has ninja), or install ninja.")
    if compiler is None:
        remedy = "Install a C++ compiler (Debian: apt install build-essential), or set CXX to yours."
        everything = not isinstance(report, str) and all(op["built"] for op in report["ops"].values())
        said = "no C++ compiler in PATH"
        return warn(COMPILER, f"{said}, but all ops are built", remedy) if everything else fail(COMPILER, said, remedy)
    own = kind_of(device).compiler
    if own is not None:
        if unread := unread_architectures(environment):
            said, remedy = unread.split(". ", 1)
            return fail(COMPILER, said, remedy)
        own_path = shutil.which(own, path=path) or shutil.which(own, path=_cuda_bin(environment))
        if own_path is None:
            said = f"{compiler}, {ninja}, but no {own}: the ops of a GPU cannot be built"
            return warn(COMPILER, said, "Install the CUDA toolkit that torch was built for, and set CUDA_HOME to it.")
        found.append(own_path)
    return ok(COMPILER, ", ".join(found))


def _cuda_bin(environment: Mapping[str, str]) -> str:
    return str(Path(environment.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
