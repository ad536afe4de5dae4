"""Studies one after another, in a world of their own: what each leaves behind of processes, ports, files and memory.

The world is made of Linux namespaces: nothing but the studies runs, listens or writes to /tmp and /dev/shm in it. It
needs root, or the right to make user namespaces.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median
from typing import Any

import psutil

RESULTS = Path(__file__).parents[1] / "results" / "operations_many_studies.json"
MODEL = Path(__file__).parents[2] / "tests" / "programs" / "tiny_study"
_SETTLE_S = 2.0
_INSIDE = "ZEROTUNE_BENCHMARK_INSIDE"
# /root or /home stays as it is: DeepSpeed's ops are built there already.
_WORLD = 'mount -t tmpfs tmpfs /tmp && mount -t tmpfs -o size=4g tmpfs /dev/shm && ip link set lo up && exec "$@"'
# Locks of slots, and one file for those of all ports: as many after the first study as after the last.
_STAYS = f"zerotune-{os.getuid()}"


def in_its_own_world(arguments: list[str]) -> int:
    """Runs this program again where nothing else is; returns its exit code."""
    user = [] if os.getuid() == 0 else ["--user", "--map-root-user"]
    command = ["unshare", *user, "--mount", "--net", "--ipc", "--pid", "--fork", "--kill-child", "--mount-proc"]
    inside = [sys.executable, "-m", "benchmarks.operations.many_studies", *arguments]
    return subprocess.run([*command, "sh", "-c", _WORLD, "sh", *inside], env={**os.environ, _INSIDE: "1"}).returncode


def study(folder: Path, trials: int) -> float:
    """Runs one study with the real command; returns its seconds."""
    command = [str(Path(sys.executable).parent / "zerotune"), "binary", str(MODEL / "deepspeed.yaml"), str(MODEL)]
    began = time.monotonic()
    ended = subprocess.run(
        [*command, "-mt", str(trials), "-z", "1"], cwd=folder, stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr
    return time.monotonic() - began


def left_over(folder: Path) -> dict[str, list[str]]:
    """Returns what there is in this world but for this process and the studies' own folders."""
    time.sleep(_SETTLE_S)
    own = os.getpid()
    processes = [process for process in psutil.process_iter(["pid", "cmdline"]) if process.pid != own]
    sockets = [connection for connection in psutil.net_connections() if connection.status == psutil.CONN_LISTEN]
    temporary = [path for path in Path("/tmp").iterdir() if path != folder]
    locks = [path for path in temporary if path.name == _STAYS]
    return {
        "processes": [" ".join(process.info["cmdline"] or [])[-120:] for process in processes],
        "listening ports": [str(connection.laddr.port) for connection in sockets],
        "temporary files": [str(path) for path in temporary if path not in locks],
        "locks": [path.name for lock_dir in locks for path in lock_dir.iterdir()],
        "shared memory": [str(path) for path in Path("/dev/shm").iterdir()],
        "System V memory": Path("/proc/sysvipc/shm").read_text().splitlines()[1:],
    }


def measure(studies: int, trials: int) -> dict[str, Any]:
    """Runs the studies; returns what the first, and what all of them, have left."""
    folder = Path("/tmp/work")
    folder.mkdir()
    os.environ["XDG_DATA_HOME"] = str(folder / "home")
    for name in ("PREFECT_API_URL", "PREFECT_HOME", "MLFLOW_TRACKING_URI"):
        os.environ.pop(name, None)
    seconds, left = [], []
    for number in range(studies):
        seconds.append(study(folder, trials))
        left.append(left_over(folder))
        print(f"study {number + 1}: {seconds[-1]:.1f} s, left {_counts(left[-1])}", file=sys.stderr, flush=True)
    return {
        "studies": studies,
        "trials_at_most": trials,
        "seconds": {"median": round(median(seconds), 1), "first": round(seconds[0], 1), "last": round(seconds[-1], 1)},
        "left_by_the_first": _counts(left[0]),
        "left_by_all": _counts(left[-1]),
        "what": {kind: things[:10] for kind, things in left[-1].items() if things},
    }


def _counts(left: dict[str, list[str]]) -> dict[str, int]:
    return {kind: len(things) for kind, things in left.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=50)
    parser.add_argument("--trials", type=int, default=2)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    if _INSIDE not in os.environ:
        sys.exit(in_its_own_world(sys.argv[1:]))
    record = measure(arguments.studies, arguments.trials)
    print(json.dumps(record, indent=2))
    arguments.output.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
