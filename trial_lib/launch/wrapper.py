"""Follows a wrapper, which is a command that starts the training through others, such as `bash run.sh`.

The wrapper runs as the user typed it, until one of its processes is a launcher, or is about to train. ZeroTune then
ends the wrapper. The result is that launch, as the user could have typed it.
"""

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.inputs.elsewhere import StartedElsewhere, started_elsewhere
from zerotune.trial_lib.inputs.launchers import launcher_in, python_target
from zerotune.trial_lib.inputs.program_code import may_start_ranks, mentions, module_file
from zerotune.trial_lib.launch import in_wrapper
from zerotune.trial_lib.launch.in_wrapper.shim import ELSEWHERE, without_shims, write_shims
from zerotune.trial_lib.launch.in_wrapper.sitecustomize import ARRIVED, OF_TORCHRUN
from zerotune.trial_lib.launch.processes.watchdog import TiedProcess, bound_logs

_POLL_S = 0.05
_FIRST_WORD_S, _NEXT_WORD_S, _GIVEN_UP_S = 15.0, 30.0, 600.0
_LAST_WORDS = 300
_HOOK = str(Path(in_wrapper.__file__).parent)
_NAME = re.compile(r"[A-Za-z_]\w*")

# The wrapper's preparation leaves no run in an experiment tracker.
_QUIET = {"WANDB_MODE": "disabled"}
# A shell, make, uv and Python set these for themselves, and every launcher sets the others for its ranks.
_NOT_TYPED = {
    *("_", "SHLVL", "PWD", "OLDPWD", "LC_CTYPE"),
    *("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "MAKE_TERMOUT", "MAKE_TERMERR", "MAKEFILE_LIST"),
    *("UV", "UV_RUN_RECURSION_DEPTH"),
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_NAME", "ROLE_WORLD_SIZE", "LOCAL_SIZE"),
    "TORCH_NCCL_ASYNC_ERROR_HANDLING",
    # DeepSpeed and MLflow, when they are imported.
    *("PYTORCH_NVML_BASED_CUDA_CHECK", "_MLFLOW_TELEMETRY_SESSION_ID"),
}
_ELASTIC = "TORCHELASTIC_"


@dataclass(frozen=True)
class Launch:
    words: tuple[str, ...]  # the command line of the launcher, or of the Python program that trains
    folder: Path  # its working directory
    variables: dict[str, str]  # the variables that it has and the wrapper had not, or had with other values
    unset: tuple[str, ...] = ()  # the names of variables that the wrapper had and it has not
    # The number of ranks that the program trains with. None for a launcher, whose words give it.
    ranks: int | None = None
    # Whether the process is a worker that the program has started within Python. No command starts it.
    is_worker: bool = False


@dataclass(frozen=True)
class NoLaunch:
    """A wrapper that has started no training."""

    status: int | None  # its exit code, as a shell reports it. None if ZeroTune gave it up.
    last_words: str  # the last line that it printed


def follow_wrapper(
    command: Sequence[str],
    folder: Path,
    environment: Mapping[str, str],
    still_waiting: Callable[[float], None],
    check: Callable[[], None] = lambda: None,
    given_up_s: float = _GIVEN_UP_S,
) -> Launch | NoLaunch | StartedElsewhere:
    """Runs a wrapper up to its launch, or to a command that would train elsewhere, and ends all its processes.

    An exception of `check`, which is called repeatedly, ends the waiting.
    """
    with tempfile.TemporaryDirectory(prefix="zerotune-wrapper-") as scratch:
        arrived, log = Path(scratch, "arrived.json"), Path(scratch, "log")
        shims = write_shims(arrived, environment)
        path = os.pathsep.join(filter(None, [_HOOK, environment.get("PYTHONPATH")]))
        given = {**environment, **_QUIET, "PYTHONPATH": path, ARRIVED: str(arrived)}
        given.pop(OF_TORCHRUN, None)
        given["PATH"] = os.pathsep.join([str(shims), environment.get("PATH", os.defpath)])
        looker = _Looker(environment)
        wrapper = TiedProcess(command, given, log, folder)
        try:
            began, word_s = time.monotonic(), _FIRST_WORD_S
            while (seconds := time.monotonic() - began) < given_up_s:
                check()
                bound_logs([log])
                # This comes first. Everything that the wrapper did before its end can be seen afterwards.
                has_ended = not wrapper.is_running
                launch = _arrived(arrived, environment) or looker.launch(wrapper.processes)
                if launch is not None:
                    return launch
                if has_ended:
                    return NoLaunch(wrapper.status, _last_line(log))
                if seconds >= word_s:
                    still_waiting(seconds)
                    word_s += _NEXT_WORD_S
                time.sleep(_POLL_S)
            return NoLaunch(None, _last_line(log))
        finally:
            wrapper.kill()


def _arrived(file: Path, before: Mapping[str, str]) -> Launch | StartedElsewhere | None:
    # The program that is about to train, from the file that `in_wrapper.sitecustomize` or a shim wrote.
    if not file.exists():
        return None
    arrival: dict[str, Any] = json.loads(file.read_text(encoding="ascii"))
    if ELSEWHERE in arrival:
        return started_elsewhere(arrival[ELSEWHERE])
    words = [arrival["interpreter"], *arrival["words"][1:]]
    variables, unset = _differences(arrival["environment"], before)
    return Launch(tuple(words), Path(arrival["folder"]), variables, unset, arrival["ranks"], arrival["is_worker"])


class _Looker:
    """Finds the launch among a wrapper's processes by their command lines."""

    def __init__(self, before: Mapping[str, str]) -> None:
        self._before = before
        self._known: set[psutil.Process] = set()

    def launch(self, processes: Sequence[psutil.Process]) -> Launch | None:
        """Returns the launch, if one of the processes is it. A parent comes before its children."""
        for process in processes:
            with contextlib.suppress(psutil.Error):
                found = self._launcher(process, process.cmdline())
                if found is not None:
                    return found
        return None

    def _launcher(self, process: psutil.Process, words: list[str]) -> Launch | None:
        launcher = launcher_in(words)
        if launcher is not None:
            return self._launch(process, launcher)
        if python_target(words) is not None and process not in self._known:
            self._known.add(process)
            if not _is_hooked(process, words) and _trains(process, words):
                ranks = process.environ().get("WORLD_SIZE", "1")
                return replace(self._launch(process, words), ranks=int(ranks) if ranks.isdecimal() else 1)
        return None

    def _launch(self, process: psutil.Process, words: list[str]) -> Launch:
        environment = process.environ()
        variables, unset = _differences(environment, self._before)
        program = words[0] if os.sep in words[0] else shutil.which(words[0], path=environment.get("PATH"))
        return Launch((program or words[0], *words[1:]), Path(process.cwd()), variables, unset)


def _is_hooked(process: psutil.Process, words: Sequence[str]) -> bool:
    # Whether a Python process will report itself. It does not if the wrapper has changed PYTHONPATH.
    deaf = any(re.fullmatch(r"-[a-zA-Z]*[IES][a-zA-Z]*", option) for option in words[1 : python_target(words)])
    return not deaf and _HOOK in process.environ().get("PYTHONPATH", "").split(os.pathsep)


def _trains(process: psutil.Process, words: Sequence[str]) -> bool:
    position = python_target(words)
    assert position is not None
    folder = Path(process.cwd())
    if words[position - 1] == "-m":
        file, folders = module_file(words[position], (folder,), "__main__.py"), (folder,)
    else:
        file = folder / words[position]
        folders = (file.parent,)
    if file is None or may_start_ranks(file, folders):
        return False
    return any("deepspeed" in word for word in words[position + 1 :]) or mentions(file, folders, "deepspeed")


def _differences(now: Mapping[str, str], before: Mapping[str, str]) -> tuple[dict[str, str], tuple[str, ...]]:
    folders = now.get("PYTHONPATH", "").split(os.pathsep)
    own = {**now, "PYTHONPATH": os.pathsep.join(folder for folder in folders if folder and folder != _HOOK)}
    if "PATH" in now:
        own["PATH"] = without_shims(now["PATH"], now.get(ARRIVED, ""))
    if not own["PYTHONPATH"] and "PYTHONPATH" not in before:
        del own["PYTHONPATH"]
    for name, value in _QUIET.items():
        if own.get(name) == value:
            own.pop(name)
            own |= {name: before[name]} if name in before else {}
    set_ = {name: value for name, value in own.items() if before.get(name) != value and _is_typed(name)}
    # With only new folders in front, as in an activated environment, the launcher's path shows the environment.
    if set_.get("PATH", "").endswith(before.get("PATH", os.defpath)):
        set_.pop("PATH", None)
    return set_, tuple(name for name in before if name not in own and _is_typed(name))


def _is_typed(name: str) -> bool:
    return name not in _NOT_TYPED and name != ARRIVED and not name.startswith(_ELASTIC) and bool(_NAME.fullmatch(name))


def _last_line(log: Path) -> str:
    text = log.read_text(encoding="utf-8", errors="replace")
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:_LAST_WORDS] if lines else ""
