"""DeepSpeed's ops, built beside what runs: on this host, and on the others that a trial spans."""

import contextlib
import json
import subprocess
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence


class OpBuilds:
    """Has ops built in processes of their own, which end with this one; who needs the ops waits for them.

    Args:
        guards: the command of `build_guard` on each host, by the host's name.
        interpreter: the Python of the ranks.
        environment: of the builds.
        note: told what takes its time.
    """

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
        self._cannot: dict[str, str] = {}
        self._is_closed = False

    @property
    def cannot(self) -> dict[str, str]:
        """Why ops cannot be built, by the names of their builders, as far as it has been tried."""
        return dict(self._cannot)

    def start(self, builders: Iterable[str]) -> bool:
        """Has ops built that nobody has asked for yet, one after the other on each host; returns at once.

        Returns:
            Whether there are any.
        """
        with self._lock:
            new = [builder for builder in dict.fromkeys(builders) if builder not in self._asked]
            self._asked.update(new)
            if not new or self._is_closed:
                return False
            for host, command in self._guards.items():
                building = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.DEVNULL,
                    text=True,
                )
                assert building.stdin is not None
                with contextlib.suppress(BrokenPipeError):
                    # By the pipe and not by the command line, which everybody on the host can read.
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
                    self._note(said["note"] + where)
                self._cannot.update({name: why + where for name, why in said.get("cannot", {}).items()})
        building.wait()

    def wait(self) -> None:
        """Waits until nothing is built any more."""
        for building, thread in list(self._running):
            thread.join()
            _close(building)

    def close(self) -> None:
        """Ends every build."""
        with self._lock:
            self._is_closed = True
        for building, _ in self._running:
            _close(building)
        self.wait()


def _close(building: "subprocess.Popen[str]") -> None:
    """Lets go of the leash of a build: it ends, if it has not."""
    assert building.stdin is not None
    # What a process that has died has not read breaks the pipe only now.
    with contextlib.suppress(BrokenPipeError):
        building.stdin.close()
