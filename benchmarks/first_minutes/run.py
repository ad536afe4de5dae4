"""Times `make demo` on a machine that has nothing: fresh clones, empty homes, no cache of pip's; revisions in turn."""

import argparse
import ctypes
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "first_minutes.json"
# The lines of make's that end a phase, of this Makefile and of the one before it.
MARKS = {
    "packages": r"touch \S+/\.(packages|installed)$",
    "ops built": r"touch \S+/\.(demo-ops|prepared)$",
    "study begins": r"zerotune adaptive ",
}
ANSWER = r"your configuration"
# Where programs look for what an earlier run has left, or for another environment.
FOREIGN = re.compile(r"(PIP_CACHE|XDG_|TORCH_EXTENSIONS|VIRTUAL_ENV|PYTHON|PREFECT_|MLFLOW_|MAKE|MFLAGS)")
PR_SET_CHILD_SUBREAPER = 36
TICKS = os.sysconf("SC_CLK_TCK")


def fresh_environment(home: Path) -> dict[str, str]:
    """Returns the variables of somebody who has just got this machine."""
    kept = {name: value for name, value in os.environ.items() if not FOREIGN.match(name)}
    folders = [folder for folder in kept["PATH"].split(os.pathsep) if not (Path(folder) / "activate").exists()]
    return kept | {"HOME": str(home), "PATH": os.pathsep.join(folders), "PIP_NO_CACHE_DIR": "1"}


def clone(revision: str, folder: Path) -> None:
    subprocess.run(["git", "clone", "-q", "--no-checkout", ROOT, folder], check=True)
    subprocess.run(["git", "-C", folder, "checkout", "-q", revision], check=True)


def busy_seconds() -> float:
    """Returns the processor time that all processes of the machine have taken since it started."""
    user, nice, system, _idle, _wait, interrupts, soft, *_ = Path("/proc/stat").read_text().split("\n")[0].split()[1:]
    return sum(map(int, (user, nice, system, interrupts, soft))) / TICKS


def own_seconds() -> float:
    """Returns the processor time of all processes that this one has started, and that have ended."""
    # A guard's children come to this process when the guard ends before them.
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def lines_of(make: "subprocess.Popen[str]", log: Path) -> Iterator[str]:
    assert make.stdout is not None
    with log.open("w") as file:
        for line in make.stdout:
            file.write(line)
            file.flush()
            yield line.rstrip()


def time_demo(revision: str, folder: Path) -> dict[str, object]:
    """Runs `make demo` of a revision; returns the seconds since its start at which each phase had ended."""
    home, code = folder / "home", folder / "zerotune"
    home.mkdir()
    clone(revision, code)
    began, busy, own = time.monotonic(), busy_seconds(), own_seconds()
    make = subprocess.Popen(
        ["make", "demo"],
        cwd=code,
        env=fresh_environment(home),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    at: dict[str, float] = {}
    answer = ""
    for line in lines_of(make, folder / "make.log"):
        passed = round(time.monotonic() - began, 1)
        print(f"{passed:7.1f}  {line}", flush=True)
        for name, mark in MARKS.items():
            if re.search(mark, line):
                at.setdefault(name, passed)
        answer = answer or (line if re.search(ANSWER, line) else "")
    exit_code = make.wait()
    wall = time.monotonic() - began
    used = own_seconds() - own
    return {
        "revision": subprocess.check_output(["git", "-C", code, "rev-parse", "--short", "HEAD"], text=True).strip(),
        "exit code": exit_code,
        "wall s": round(wall, 1),
        "at s": at,
        "processor s": round(used, 1),
        "processor s of others": round(busy_seconds() - busy - used, 1),
        "answer": answer,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("revisions", nargs="*", default=["HEAD"], help="of this repository; what is committed counts")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="a folder for the clones, which stay there")
    args = parser.parse_args()
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    runs = []
    for number in range(args.rounds):
        for revision in args.revisions:
            print(f"round {number + 1}, {revision}", flush=True)
            parent = Path(tempfile.mkdtemp(prefix="first-minutes-", dir=args.keep))
            try:
                runs.append(time_demo(revision, parent))
            finally:
                if args.keep is None:
                    shutil.rmtree(parent, ignore_errors=True)
            print(json.dumps(runs[-1]), flush=True)
    document = {"python": sys.version.split()[0], "cores": len(os.sched_getaffinity(0)), "runs": runs}
    RESULTS.write_text(json.dumps(document, indent=2) + "\n")


if __name__ == "__main__":
    main()
