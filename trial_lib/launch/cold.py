"""The cold starter: fresh interpreters for every trial."""

import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from trial_lib.launch.op_builds import OpBuilds
from trial_lib.launch.processes import bootstrap, channel
from trial_lib.launch.processes.config_check import Judgement
from trial_lib.launch.processes.jit_builds import clear_stale_locks
from trial_lib.launch.processes.torch_cache import remove_empty_torch_cache
from trial_lib.launch.rank_starter import Launched, LaunchRequest


class ColdStarter:
    """Starts each rank as a fresh interpreter; seconds each, and nothing shared between trials.

    Args:
        interpreter: the Python of the ranks.
        builders: DeepSpeed ops to build ahead of the first trial.
        environment: of the builds.
        note: told what takes its time.
        ahead: ops to build beside the profile trial, and ahead of every other.
        hosts: the commands of `build_guard` on other hosts that a trial spans, by their names.
    """

    def __init__(
        self,
        interpreter: str,
        builders: list[str],
        environment: dict[str, str],
        note: Callable[[str], None],
        ahead: Sequence[str] = (),
        hosts: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        self._interpreter = interpreter
        self._builders = builders
        self._ahead = ahead
        self._environment = environment
        here = {"this host": bootstrap.command(sys.executable, "trial_lib.launch.processes.build_guard")}
        self._builds = OpBuilds({**here, **(hosts or {})}, interpreter, environment, note)
        self._judge: subprocess.Popen[str] | None = None

    def launch(self, request: LaunchRequest) -> Launched:
        """Starts a guard, which starts the ranks."""
        self._prepare(request)
        guard = self._start_guard("trial_lib.launch.processes.guard", request.to_json(), request)
        return Launched(guard, len(request.ranks))

    def _prepare(self, request: LaunchRequest) -> None:
        self._build()
        self.start_builds()
        self.await_builds(request)
        # Fresh ranks load the ops anew, and would wait for a lock that a killed one left.
        clear_stale_locks(request.ranks[0].environment)

    def _build(self) -> None:
        """Builds what every trial is to find built, if that is not done yet; nothing else is being built then."""
        if self._builds.start(self._builders):
            self._builds.wait()

    def start_builds(self) -> None:
        """Starts to build what trials beyond the profile need; returns at once."""
        self._builds.start(self._ahead)

    def await_builds(self, request: LaunchRequest) -> None:
        """Waits for what is being built, where a launch may not run beside that."""
        if not request.beside_builds:
            self._builds.wait()

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """See `RankStarter.build`."""
        self._builds.start(builders)
        self._builds.wait()
        return self._builds.cannot

    def _start_guard(self, module: str, message: dict[str, Any], request: LaunchRequest) -> socket.socket:
        """Starts a guard's module, sends it what it is to do, and returns the socket to it."""
        ours, theirs = socket.socketpair()
        with theirs:
            guard = subprocess.Popen(
                bootstrap.command(sys.executable, module, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        threading.Thread(target=guard.wait, daemon=True, name="reap-guard").start()
        channel.send(ours, message, request.descriptors)
        return ours

    def check(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        """See `RankStarter.check`; in a process of its own, which imports DeepSpeed first."""
        read, write = os.pipe()
        with open(read, encoding="utf-8") as pipe:  # noqa: PTH123 - a pipe
            try:
                self._judge = subprocess.Popen(
                    bootstrap.command(self._interpreter, "trial_lib.launch.processes.config_check", str(write)),
                    pass_fds=[write],
                    env=self._environment,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
            finally:
                os.close(write)
            with contextlib.suppress(BrokenPipeError):
                self._judge.communicate(json.dumps({"ds_config": ds_config, "slots": slots}))
            judged = pipe.read()
        return json.loads(judged) if judged else None

    def prime(self, modules: list[str]) -> None:
        """Does nothing: a fresh interpreter imports for itself."""

    def close(self) -> None:
        """Leaves nothing behind: nothing runs between trials but builds, and the check of a configuration."""
        self._builds.close()
        if self._judge is not None:
            self._judge.kill()
            self._judge.wait()
        remove_empty_torch_cache(self._environment)


def rank_environment(interpreter: str = sys.executable, has_one_thread: bool = True) -> dict[str, str]:
    """Returns the environment that ranks start from: the driver's.

    Args:
        interpreter: the Python of the ranks.
        has_one_thread: whether each has one OpenMP thread, unless the user's own environment says how many.
    """
    environment = dict(os.environ)
    if has_one_thread:
        environment.setdefault("OMP_NUM_THREADS", "1")
    # Answers `is_available()` from the driver library, without initialising CUDA, after which no fork could use it.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Another ninja than the one that built DeepSpeed's ops takes them all for outdated: the interpreter's own, always.
    environment["PATH"] = os.pathsep.join([str(Path(interpreter).parent), environment.get("PATH", os.defpath)])
    return environment
