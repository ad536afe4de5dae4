"""Builds DeepSpeed's ops beside running trials, on this host and on the other hosts that a trial spans."""

import contextlib
import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence

from trial_lib.records.units import duration

_POLL_S, _WORD_S, _END_S = 0.5, 120.0, 5.0


class OpBuilds:
    """Has ops built in processes that end with this one, by `build_guard` on each host. Launches wait for them."""

    def __init__(
        self,
        guards: Mapping[str, Sequence[str]],
        interpreter: str,
        environment: Mapping[str, str],
        note: Callable[[str], None],
    ) -> None:
        self._guards = guards
        self._told = {"interpreter": interpreter, "environment": dict(environment)}
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
                    building.stdin.write(json.dumps({**self._told, "builders": new}) + "\n")
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
    # Lets go of the leash of a build, which ends it.
    assert building.stdin is not None
    # If the process has died before it read everything, the pipe breaks only now.
    with contextlib.suppress(BrokenPipeError):
        building.stdin.close()
