"""The cold starter. Every trial has new interpreters."""

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
from trial_lib.launch.rank_starter import Launched, LaunchRequest
from trial_lib.wire.imported import Import


class ColdStarter:
    """Starts each rank as a new interpreter. That takes seconds, and trials share nothing.

    Args:
        interpreter: the Python of the ranks.
        builders: DeepSpeed ops to build before the first trial after the profile trial.
        environment: the environment variables of the builds.
        note: called with a sentence when something takes long.
        ahead: ops to build after the profile trial, before all other trials.
        hosts: the command of `build_guard` on each other host of a trial, by the host's name.
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
        self._spans_hosts = hosts is not None
        self._builds = OpBuilds({**here, **(hosts or {})}, interpreter, environment, note)
        self._judge: subprocess.Popen[str] | None = None

    def launch(self, request: LaunchRequest) -> Launched:
        """Starts a guard, which starts the ranks."""
        self._prepare(request)
        guard = self._start_guard("trial_lib.launch.processes.guard", request.to_json(), request)
        return Launched(guard, len(request.ranks))

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        """See `RankStarter.prepare`."""
        # Ranks on other hosts do not say what they need.
        if not beside_builds or self._spans_hosts:
            self._build()
        self.start_and_await(beside_builds)

    def _prepare(self, request: LaunchRequest) -> None:
        self.prepare(request.beside_builds, request.starts_cold)
        # New ranks load the ops again, and would wait for a lock that a killed rank has left.
        clear_stale_locks(request.ranks[0].environment)

    def _build(self) -> None:
        """Builds the ops that every trial needs, unless they are built. Nothing else is being built then."""
        if self._builds.start(self._builders):
            self._builds.wait()

    def start_builds(self) -> None:
        """Starts the builds for the trials after the profile trial, and returns at once."""
        self._builds.start(self._ahead)

    def start_and_await(self, beside_builds: bool) -> None:
        """Starts the builds for the trials after the profile trial, and waits for all, unless this is that trial.

        The profile trial shows whether the program has an engine at all.
        """
        if not beside_builds:
            self.start_builds()
            self._builds.wait()

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """See `RankStarter.build`."""
        self._builds.start(builders)
        self._builds.wait()
        return self._builds.cannot

    @property
    def has_compiled(self) -> bool:
        """See `RankStarter.has_compiled`."""
        return self._builds.has_compiled

    def _start_guard(self, module: str, message: dict[str, Any], request: LaunchRequest) -> socket.socket:
        """Starts a guard, sends it a message, and returns the socket to it."""
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
        """See `RankStarter.check`. A process of its own imports DeepSpeed and answers."""
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

    def prime(self, imported: Sequence[Import]) -> None:
        """Does nothing, because a new interpreter imports for itself."""

    def close(self) -> None:
        """Ends the builds, and the check of a configuration. Nothing else runs between trials."""
        self._builds.close()
        if self._judge is not None:
            self._judge.kill()
            self._judge.wait()


def rank_environment(interpreter: str = sys.executable, has_one_thread: bool = True) -> dict[str, str]:
    """Returns the environment that ranks start from, which is the driver's with a few changes.

    Args:
        interpreter: the Python of the ranks.
        has_one_thread: whether each rank has one OpenMP thread, unless the user's environment sets the number.
    """
    environment = dict(os.environ)
    if has_one_thread:
        environment.setdefault("OMP_NUM_THREADS", "1")
    # With this `is_available()` asks the driver library. It does not initialise CUDA, which no fork could use then.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Another ninja than the builder's takes all ops for outdated, so the interpreter's ninja comes first.
    environment["PATH"] = os.pathsep.join([str(Path(interpreter).parent), environment.get("PATH", os.defpath)])
    return environment
