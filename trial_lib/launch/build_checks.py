"""What the doctor looks at before a rank can train: devices and driver, torch and DeepSpeed, what builds its ops."""

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

from trial_lib.device.host.base import Host
from trial_lib.experiment.check import Check, fail, mebibytes, ok, warn
from trial_lib.experiment.errors import InputError
from trial_lib.launch import bootstrap
from trial_lib.launch.jit_builds import build_folders, is_stale

_REPORT_S = 60.0
_KILLED_S = 2.0
ACCELERATORS, ENVIRONMENT, OPS, LOCKS, COMPILER = "accelerators", "environment", "ops", "build locks", "compiler"


def environment_report(interpreter: str, environment: Mapping[str, str]) -> dict[str, Any] | str:
    """Returns what `trial_lib.launch.environment_report` says, or in a sentence why it says nothing."""
    try:
        text, last = _ask("trial_lib.launch.environment_report", interpreter, environment)
    except TimeoutError:
        return f"importing torch and DeepSpeed has not ended within {_REPORT_S:.0f} s"
    if not text:
        return f"torch and DeepSpeed cannot be imported: {last}"
    report: dict[str, Any] = json.loads(text)
    return report


def devices() -> tuple[Host, str | None]:
    """Returns what this process may use, and the version of the NVIDIA driver, None without one.

    Raises:
        InputError: there is a driver, and it does not answer.
    """
    where = "the NVIDIA driver"
    try:
        text, last = _ask("trial_lib.launch.host_report", sys.executable, os.environ)
    except TimeoutError:
        what = f"it has not said within {_REPORT_S:.0f} s which GPUs there are."
        raise InputError(what, where=where, remedy="See whether `nvidia-smi` hangs; if so, restart the host.") from None
    if not text:
        raise InputError(f"asking it has failed ({last}).", where=where, remedy="See what `nvidia-smi` says.")
    found = json.loads(text)
    if "error" in found:
        raise InputError(**found["error"])
    return Host(**found["host"]), found["driver"]


def _ask(module: str, interpreter: str, environment: Mapping[str, str]) -> tuple[str, str]:
    """Returns what a module writes in a process of its own, empty where it fails, and the last line of its errors.

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
            # One that hangs in the kernel dies when the driver lets it, if ever: not waited for.
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.communicate(timeout=_KILLED_S)
            raise TimeoutError from None
        text = answer.read()
    last = said.strip().splitlines() or [f"it ended with {process.returncode}"]
    return text if process.returncode == 0 else "", last[-1]


def check_accelerators(found: tuple[Host, str | None] | InputError, report: Mapping[str, Any] | str) -> Check:
    """Looks at the devices, their driver, and whether torch can use them.

    Args:
        found: what `devices` returns or raises.
        report: `environment_report`'s.
    """
    if isinstance(found, InputError):
        return fail(ACCELERATORS, f"{found.where}: {found.what}", found.remedy)
    host, driver = found
    if isinstance(report, str):
        return ok(ACCELERATORS, _slots(host, driver))
    if host.device == "cuda" and report["torch_cuda"] is None:
        return fail(
            ACCELERATORS,
            f"{_slots(host, driver)}, but torch {report['torch']} is built without CUDA, so no rank can use them",
            "Install the build of torch that fits the driver (pytorch.org/get-started), then ZeroTune again.",
        )
    if host.device == "cuda" and report["torch_sees"] == 0:
        return fail(
            ACCELERATORS,
            f"{_slots(host, driver)}, but torch, built for CUDA {report['torch_cuda']}, sees none",
            "Update the driver to one that knows this CUDA, or install a build of torch for an older one.",
        )
    if host.device == "cpu" and report["torch_cuda"] is not None:
        why = "CUDA_VISIBLE_DEVICES hides the GPUs" if driver else "no NVIDIA driver answers"
        return warn(
            ACCELERATORS,
            f"{_slots(host, driver)}: {why}, though torch is built for CUDA {report['torch_cuda']}",
            "With GPUs: install the driver, start a container with --gpus all, or unset CUDA_VISIBLE_DEVICES.",
        )
    return ok(ACCELERATORS, _slots(host, driver))


def _slots(host: Host, driver: str | None) -> str:
    memory = f"{len(host.slots)} slots of {mebibytes(host.memory_per_slot)}"
    return f"no GPU; {memory}, a core each" if host.device == "cpu" else f"{memory} (GPUs, driver {driver})"


def check_environment(interpreter: str, report: Mapping[str, Any] | str) -> Check:
    """Looks at whether torch and DeepSpeed can be imported."""
    if isinstance(report, str):
        return fail(ENVIRONMENT, f"{interpreter}: {report}", "Run that import by hand, and mend what it says.")
    device = f"DeepSpeed {report['deepspeed']} on {report['accelerator']}"
    return ok(ENVIRONMENT, f"{interpreter}: Python {report['python']}, torch {report['torch']}, {device}")


def check_ops(report: Mapping[str, Any] | str, wanted: Sequence[str]) -> Check:
    """Looks at DeepSpeed's ops: those that are built, and those that can be.

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
    """Returns the first thing that DeepSpeed says; what may help follows it."""
    return next(filter(None, (part.strip(" .") for part in why.split("[WARNING]"))), why)


def check_locks(environment: Mapping[str, str]) -> Check:
    """Looks for the locks of builds that were killed, which every later process waits for in silence."""
    stale = [folder / "lock" for folder in build_folders(environment) if is_stale(folder / "lock")]
    if not stale:
        return ok(LOCKS, "none that a killed build has left")
    remedy = shlex.join(["rm", *map(str, stale)])
    return fail(LOCKS, f"{len(stale)} that a killed build has left: all who need the op wait for ever", remedy)


def check_compiler(environment: Mapping[str, str], device: str, report: Mapping[str, Any] | str) -> Check:
    """Looks for what builds DeepSpeed's ops: a C++ compiler, ninja, and nvcc where there are GPUs."""
    path = environment.get("PATH", "")
    compiler = shutil.which(environment.get("CXX", "c++"), path=path)
    ninja = shutil.which("ninja", path=path)
    found = [tool for tool in (compiler, ninja) if tool]
    if ninja is None:
        said = "no ninja in PATH: not even an op that is built can be loaded"
        return fail(COMPILER, said, "Activate the environment that ZeroTune is in (it brings ninja), or install it.")
    if compiler is None:
        remedy = "Install a C++ compiler (Debian: apt install build-essential), or name yours by CXX."
        everything = not isinstance(report, str) and all(op["built"] for op in report["ops"].values())
        said = "no C++ compiler in PATH"
        return warn(COMPILER, f"{said}, but all ops are built", remedy) if everything else fail(COMPILER, said, remedy)
    if device == "cuda":
        nvcc = shutil.which("nvcc", path=path) or shutil.which("nvcc", path=_cuda_bin(environment))
        if nvcc is None:
            said = f"{compiler}, {ninja}, but no nvcc: the ops of a GPU cannot be built"
            return warn(COMPILER, said, "Install the CUDA toolkit that torch was built for, and set CUDA_HOME to it.")
        found.append(nvcc)
    return ok(COMPILER, ", ".join(found))


def _cuda_bin(environment: Mapping[str, str]) -> str:
    return str(Path(environment.get("CUDA_HOME", "/usr/local/cuda")) / "bin")
