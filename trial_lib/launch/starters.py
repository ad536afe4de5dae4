"""The starters of trials on this host: cold, with new interpreters, and warm, by forks of a primed one."""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.launch.processes import bootstrap, channel, supervisor
from zerotune.trial_lib.launch.processes.environment_check import CONFIGURATION, JUDGED_S, Judgement
from zerotune.trial_lib.launch.processes.jit_builds import clear_stale_locks
from zerotune.trial_lib.launch.processes.rank_process import NUMBER
from zerotune.trial_lib.launch.processes.watchdog import LOOK_S, StoppedLooks, is_stopped
from zerotune.trial_lib.launch.rank_starter import Launched, LaunchRequest, StarterClosedError
from zerotune.trial_lib.messages.files import open_own
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.messages.orders import modules_in
from zerotune.trial_lib.records.units import duration

# Builds of DeepSpeed's ops beside running trials, on this host and on the other hosts that a trial spans.

_POLL_S, _WORD_S, _END_S = 0.5, 120.0, 5.0


class OpBuilds:
    """Has ops built in processes that end with this one, under a guard on each host. Launches wait for them."""

    def __init__(
        self,
        interpreter: str,
        environment: Mapping[str, str],
        note: Callable[[str], None],
        others: Mapping[str, Sequence[str]] | None = None,
    ) -> None:
        # The commands of the guards, by the names of their hosts.
        self._guards = {"this host": supervisor.command(sys.executable, supervisor.BUILD), **(others or {})}
        self._order = {"interpreter": interpreter, "environment": dict(environment)}
        self._note = note
        self._lock = threading.Lock()
        self._asked: set[str] = set()
        self._running: list[tuple[subprocess.Popen[str], threading.Thread]] = []
        # The reasons for ops that could not be built so far, by the names of their builders.
        self.cannot: dict[str, str] = {}
        self._is_closed = False
        # Whether an op had to be compiled, which takes minutes of several cores.
        self.has_compiled = False

    def start(self, builders: Iterable[str]) -> bool:
        """Has new ops built, one after the other on each host, and returns at once whether there are any."""
        with self._lock:
            new = [builder for builder in dict.fromkeys(builders) if builder not in self._asked]
            self._asked.update(new)
            if not new or self._is_closed:
                return False
            for host, command in self._guards.items():
                building = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
                )
                assert building.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    # Every user of the host can read a command line, so the message goes through the pipe.
                    building.stdin.write(json.dumps({**self._order, "builders": new}) + "\n")
                    building.stdin.flush()
                thread = threading.Thread(target=self._listen, args=(host, building), daemon=True, name="build-ops")
                thread.start()
                self._running.append((building, thread))
        return True

    def _listen(self, host: str, building: "subprocess.Popen[str]") -> None:
        where = f" on {host}" if len(self._guards) > 1 else ""
        assert building.stdout is not None
        for line in building.stdout:
            with contextlib.suppress(ValueError):
                said = json.loads(line)
                if "note" in said:
                    self.has_compiled = True
                    self._note(said["note"] + where)
                self.cannot.update({name: why + where for name, why in said.get("cannot", {}).items()})
        building.wait()

    def wait(self) -> None:
        """Until no build runs, or another thread has called `close`. Says so now and then."""
        began = time.monotonic()
        word_at = began + _WORD_S
        for building, thread in list(self._running):
            while thread.is_alive() and not self._is_closed:
                thread.join(_POLL_S)
                if time.monotonic() > word_at:
                    word_at += _WORD_S
                    taken = duration(time.monotonic() - began)
                    self._note(f"DeepSpeed's ops are still being built. Trials have waited {taken} for them")
            _close(building)

    def close(self) -> None:
        with self._lock:
            self._is_closed = True
        for building, _ in self._running:
            _close(building)
        for building, thread in self._running:
            thread.join(_END_S)
            if thread.is_alive():
                # Its guard is stopped (SIGSTOP), and ends by a kill alone.
                building.kill()


def _close(building: "subprocess.Popen[str]") -> None:
    # Closes the tie of a build, which ends it.
    assert building.stdin is not None
    # If the process has died before it read everything, the pipe breaks only now.
    with contextlib.suppress(BrokenPipeError):
        building.stdin.close()


# The cold starter. Every trial has new interpreters.


class ColdStarter:
    """Starts each rank as a new interpreter. That takes seconds, and trials share nothing."""

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
        self._spans_hosts = hosts is not None
        self._builds = OpBuilds(interpreter, environment, note, hosts or {})
        self._question: channel.Question | None = None

    def launch(self, request: LaunchRequest) -> Launched:
        self._prepare(request)
        guard = self._start_guard(supervisor.RANKS_OF_TRIAL, request.to_json(), request)
        return Launched(guard, len(request.ranks))

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        # Ranks on other hosts do not say what they need.
        if not beside_builds or self._spans_hosts:
            self._build()
        self.start_and_await(beside_builds)

    def _build(self) -> None:
        # The ops that every trial needs, before anything else is built.
        if self._builds.start(self._builders):
            self._builds.wait()

    def _prepare(self, request: LaunchRequest) -> None:
        self.prepare(request.beside_builds, request.starts_cold)
        # New ranks load the ops again, and would wait for a lock that a killed rank has left.
        clear_stale_locks(request.ranks[0].environment)

    def start_and_await(self, beside_builds: bool) -> None:
        """Starts the builds for the trials after the profile trial, and waits for all, unless this is that trial.

        The profile trial shows whether the program has an engine at all.
        """
        if not beside_builds:
            self._builds.start(self._ahead)
            self._builds.wait()

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        self._builds.start(builders)
        self._builds.wait()
        return dict(self._builds.cannot)

    @property
    def has_compiled(self) -> bool:
        return self._builds.has_compiled

    def _start_guard(self, supervised: str, message: dict[str, Any], request: LaunchRequest) -> socket.socket:
        # Starts a guard, sends it a message, and returns the socket to it.
        ours, theirs = socket.socketpair()
        with theirs:
            guard = subprocess.Popen(
                supervisor.command(sys.executable, supervised, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        threading.Thread(target=guard.wait, daemon=True, name="reap-guard").start()
        channel.send(ours, message, request.descriptors)
        return ours

    def check(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        """A process of its own imports DeepSpeed and answers."""
        asked = json.dumps({"ds_config": ds_config, "slots": slots})
        environment_check = "zerotune.trial_lib.launch.processes.environment_check"
        self._question = channel.Question(
            self._interpreter, self._environment, environment_check, CONFIGURATION, given=asked
        )
        with contextlib.suppress(channel.NoAnswerError, TimeoutError):
            judgement: Judgement = self._question.answer(JUDGED_S)
            return judgement
        return None

    def prime(self, imported: Sequence[Import]) -> None:
        """Does nothing, because a new interpreter imports for itself."""

    def close(self) -> None:
        """Ends the builds, and the check of a configuration. Nothing else runs between trials."""
        self._builds.close()
        if self._question is not None:
            self._question.end()


def rank_environment(interpreter: str = sys.executable, has_one_thread: bool = True) -> dict[str, str]:
    """The environment that ranks start from: the driver's, with one OpenMP thread unless the user sets it."""
    environment = dict(os.environ)
    if has_one_thread:
        environment.setdefault("OMP_NUM_THREADS", "1")
    # With this `is_available()` asks the driver library. It does not initialise CUDA, which no fork could use then.
    environment["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"
    # Another ninja than the builder's takes all ops for outdated, so the interpreter's ninja comes first.
    environment["PATH"] = os.pathsep.join([str(Path(interpreter).parent), environment.get("PATH", os.defpath)])
    return environment


# The warm starter. Ranks are forks of a primed interpreter and start in a fraction of a second.

_CLOSE_S = 10
# What no trial has imported yet may wait for a network.
_PATIENCE_S = 60.0
# Without this Arrow's allocator starts a thread when MLflow or pandas imports it. Ranks have their own environment.
_FIT_TO_FORK = {"JE_ARROW_MALLOC_CONF": "background_thread:false"}
# Without this OpenBLAS, which numpy imports, starts a thread for each core. The ranks start theirs themselves.
_ONE_THREAD = {NUMBER: "1"}


class WarmStarter:
    """Keeps one fork server for the user's interpreter and environment, and forks trials from it.

    A server that has died is started again. A server with a thread or an initialised driver must not fork. Its trials
    then start cold, a note says so, and the server ends.
    """

    def __init__(
        self,
        interpreter: str,
        builders: list[str],
        environment: dict[str, str],
        log: str,
        note: Callable[[str], None],
        ahead: Sequence[str] = (),
        leading: Sequence[str] = (),
        without: Sequence[str] = (),
    ) -> None:
        self._interpreter = interpreter
        self._builders = builders
        self._environment = environment
        self._log = log
        self._note = note
        self._leading = list(leading)
        self._without = list(without)
        self._leads = False
        self._cold = ColdStarter(interpreter, builders, environment, note, ahead)
        self._lock = threading.Lock()
        self._server: subprocess.Popen[bytes] | None = None
        self._channel: socket.socket | None = None
        self._ready = False
        self._primed: set[str] = set()
        self._loaded: set[str] = set()
        self._doubt: str | None = None
        self._running: list[Launched] = []  # forks of the server
        self._ended: list[subprocess.Popen[bytes]] = []
        self._closed = False

    def start(self) -> None:
        """Starts the server and returns at once, so that other servers can start too."""
        with self._lock:
            self._start()

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        ahead = {"imports": self._leading, "without": self._without, "patience_s": _PATIENCE_S}
        # They may be what kills a server. The next one does without them.
        self._leads, self._leading = bool(self._leading), []
        with theirs, open_own(Path(self._log), "ab") as log:
            self._server = subprocess.Popen(
                bootstrap.command(
                    self._interpreter,
                    "zerotune.trial_lib.launch.processes.fork_server",
                    str(theirs.fileno()),
                    json.dumps(ahead),
                    *self._builders,
                ),
                pass_fds=[theirs.fileno()],
                env={**_FIT_TO_FORK, **self._environment, **_ONE_THREAD},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )
        self._channel = ours
        self._ready = False
        self._primed = set()

    def prepare(self, beside_builds: bool, starts_cold: bool) -> None:
        """If the server dies meanwhile, the launch starts another."""
        self._cold.start_and_await(beside_builds)
        if starts_cold or self._doubt:
            self._cold.prepare(beside_builds, starts_cold)
            return
        with self._lock, contextlib.suppress(OSError, EOFError):
            if self._channel is not None:
                self._wait_until_ready()

    def launch(self, request: LaunchRequest) -> Launched:
        self._cold.start_and_await(request.beside_builds)
        if request.starts_cold and not self._closed:
            return self._cold.launch(request)
        with self._lock:
            for _ in range(2):
                launched = None if self._doubt or self._closed else self._fork(request)
                if launched is not None:
                    self._running = [*filter(Launched.is_running, self._running), launched]
                    return launched
            self._retire()
        if self._closed:
            raise StarterClosedError
        why = (
            f"{self._doubt} (docs/operations.md)"
            if self._doubt
            else f"the fork server does not come up, see {self._log}"
        )
        self._note(f"starting cold: {why}")
        return self._cold.launch(request)

    def _fork(self, request: LaunchRequest) -> Launched | None:
        # The running trial. None if the server must not fork, or has died, and is then dropped.
        try:
            if self._channel is None:
                self._start()
            self._wait_until_ready()
            if self._doubt:
                return None
            assert self._channel is not None
            ours, theirs = socket.socketpair()
            with theirs:
                channel.send(self._channel, {"launch": request.to_json()}, (theirs.fileno(), *request.descriptors))
                self._doubt = self._answer("doubt")
            if self._doubt:
                ours.close()
                return None
            return Launched(ours, len(request.ranks))
        except (OSError, EOFError):
            if self._leads and not self._ready and not self._closed:
                self._note("the fork server died while it ran the program's first imports: another one leaves them out")
            self._drop()
            return None

    def _wait_until_ready(self) -> None:
        if not self._ready:
            self._doubt = self._answer("ready", "doubt")
            self._ready = True

    def _answer(self, *keys: str) -> Any:
        # The value of the last key in the server's next answer. Passes its notes on.
        assert self._channel is not None
        while True:
            self._wait_for_word()
            received = channel.receive(self._channel)
            if received is None:
                raise EOFError("the fork server is gone")
            message = received[0]
            self._loaded.update(message.get("loaded", ()))
            if keys[0] in message:
                return message[keys[-1]]
            if "ready" in message:
                self._doubt, self._ready = message["doubt"], True
            else:
                self._note(message["note"])

    def _retire(self) -> None:
        # Ends a server that must not fork when none of its trials runs, because it only holds memory.
        if self._doubt and self._server is not None and not any(map(Launched.is_running, self._running)):
            self._ended.append(self._server)
            self._drop()

    def check(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        """The server answers when it has imported DeepSpeed."""
        with self._lock:
            if self._doubt is None:
                return self._judged_by_server(ds_config, slots)
        return self._cold.check(ds_config, slots)

    def _judged_by_server(self, ds_config: Mapping[str, Any], slots: int) -> Judgement | None:
        if self._channel is None:
            return None
        try:
            channel.send(self._channel, {"check": {"ds_config": ds_config, "slots": slots}})
            judgement: Judgement | None = self._answer("checked")
        except (OSError, EOFError):
            # The next launch finds that the server is gone, and starts another.
            return None
        return judgement

    def _wait_for_word(self) -> None:
        # Its imports may take long. `EOFError`: it was killed, or was stopped (SIGSTOP) and stays so.
        assert self._channel is not None
        stopped = StoppedLooks()
        while not select.select([self._channel], [], [], LOOK_S)[0]:
            stopped.are_stopped(self._server_pids())
            if stopped.stay_stopped:
                self._note("the fork server was stopped: another one is started in its place")
                raise EOFError("the fork server was stopped")

    def _server_pids(self) -> list[int]:
        # Of the server and its watchdog, which is this process's child.
        with contextlib.suppress(psutil.NoSuchProcess):
            if self._server is not None:
                watchdog = psutil.Process(self._server.pid)
                return [process.pid for process in (watchdog, *watchdog.children())]
        return []

    def build(self, builders: Sequence[str]) -> dict[str, str]:
        """What the server has loaded is built."""
        return self._cold.build([name for name in builders if name not in self._loaded])

    @property
    def has_compiled(self) -> bool:
        return self._cold.has_compiled

    def prime(self, imported: Sequence[Import]) -> None:
        """Imports the modules of the profile trial in the server, except those that would keep it from forking."""
        modules = modules_in(imported)
        with self._lock:
            if self._channel is None or self._doubt or self._primed.issuperset(modules):
                return
            try:
                self._wait_until_ready()
                if self._doubt:
                    self._retire()
                    return
                channel.send(self._channel, {"prime": list(imported), "without": self._without})
                self._answer("primed")
                self._primed.update(() if self._without else modules)
            except (OSError, EOFError):
                self._note("the fork server died of the code's own imports: they are paid in each trial")
                self._drop()
                if not self._closed:
                    self._start()

    def _drop(self) -> None:
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        if self._server is not None:
            if any(map(is_stopped, self._server_pids())):
                # The processes below it then find that their parent is gone, and clean up.
                self._server.kill()
            # A killed server's watchdog stays until its running trials have ended. No launch waits for that.
            threading.Thread(target=self._server.wait, daemon=True, name="reap-server").start()
            self._server = None

    def close(self) -> None:
        """Ends the server, and with it the trials that run."""
        self._closed = True
        serving, server = self._channel, self._server
        if serving is not None:
            # A launch that waits for a primed server holds the lock. This ends the launch.
            with contextlib.suppress(OSError):
                serving.shutdown(socket.SHUT_RDWR)
        with self._lock:
            self._drop()
        for ended in filter(None, (*self._ended, server)):
            with contextlib.suppress(subprocess.TimeoutExpired):
                ended.wait(timeout=_CLOSE_S)
        self._cold.close()
