"""Shows on one GPU what no processor can: stages that each check something, write it down at once, and have a limit.

python benchmarks/gpu/run.py --stages host endings kernels --out FOLDER
"""

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)] if str(ROOT) not in sys.path else []

import psutil  # noqa: E402 - the repository is not installed where this runs

from benchmarks.gpu import report as reports  # noqa: E402

# In the order of GPU work: what is cheap and finds what is broken comes first.
LIMITS_S = {
    "host": 60,
    "endings": 180,
    "kernels": 150,
    "precision": 120,
    "builds": 240,
    "clock": 240,
    "memory": 240,
    "sweeps": 180,
    "switches": 300,
    "rates": 60,
    "study": 420,
    "autotuner": 480,
}
# These time nothing, so that their cases may run beside each other.
UNTIMED = ("endings", "kernels", "precision", "memory")
# Where cores are the devices, others' trials and tests wait for the same.
LONGER_ON_CORES = 4
GRACE_S = 5.0
LAST_LINES = 15


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--stages", nargs="+", choices=LIMITS_S, default=list(LIMITS_S), metavar="STAGE")
    parser.add_argument("--out", type=Path, required=True, help="folder for a JSON file of each stage, and the table")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: at toy size, to run every line")
    parser.add_argument("--seconds", type=float, default=570.0, help="for all stages together (default: %(default)g)")
    parser.add_argument(
        "--lanes", type=int, default=1, help=f"parts that {', '.join(UNTIMED)} are cut into; all of them run at once"
    )
    parser.add_argument("--part", type=int, nargs=2, default=[0, 1], help=argparse.SUPPRESS)
    parser.add_argument("--stage", choices=LIMITS_S, help=argparse.SUPPRESS)  # what a child is started with
    return parser.parse_args()


def limit_s(stage: str, device: str) -> float:
    """Returns how many seconds a stage may take."""
    return LIMITS_S[stage] * (LONGER_ON_CORES if device == "cpu" else 1)


def environment(device: str) -> dict[str, str]:
    """Returns what a stage runs in: this interpreter's programs come first, and a processor means no GPU."""
    own = {"PYTHONUNBUFFERED": "1", "MAX_JOBS": str(min(16, os.cpu_count() or 1))}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return {**os.environ, **own, **hidden, "PATH": path, "PYTHONPATH": str(ROOT)}


def run_part(stage: str, device: str, out: Path, limit_s: float, part: tuple[int, int]) -> None:
    """Runs a part of a stage in a process of its own, which is killed with all that it started at its limit."""
    command = [sys.executable, str(Path(__file__)), "--stage", stage, "--device", device, "--out", str(out)]
    command += ["--part", *map(str, part)]
    started = time.monotonic()
    # Not the stage's own: one that is killed would leave it.
    folder = tempfile.TemporaryDirectory(prefix=f"zerotune-gpu-{stage}-", ignore_cleanup_errors=True)
    with folder as work, tempfile.TemporaryFile("w+") as log:
        child = psutil.Popen(
            command,
            cwd=ROOT,
            env={**environment(device), "TMPDIR": work},
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code = child.wait(limit_s)
            ended = "by itself" if code == 0 else f"with exit status {code}"
        except psutil.TimeoutExpired:
            ended = f"at its limit of {limit_s:.0f} s"
        finally:
            kill(child)
        log.seek(0)
        words = log.read().splitlines()[-LAST_LINES:]
    how = {"ended": ended, "seconds": round(time.monotonic() - started, 1), "limit_s": round(limit_s)}
    words_of_end = {} if ended == "by itself" else {"last_words": words}
    reports.complete(out, reports.name_of(stage, part), **how, **words_of_end)


def run_stages(stages: Sequence[str], device: str, out: Path, left_s: float, lanes: int) -> None:
    """Runs the parts of some stages, all at once."""
    parts = [(stage, (number, lanes)) for stage in stages for number in range(lanes)]
    with ThreadPoolExecutor(len(parts)) as threads:
        for stage, part in parts:
            threads.submit(run_part, stage, device, out, min(limit_s(stage, device), left_s), part)
    for stage in stages:
        reports.merge(out, stage, lanes)


def kill(process: psutil.Popen) -> None:
    """Ends a process, and whatever it has started in sessions of their own; ranks go with the driver by themselves."""
    with contextlib.suppress(psutil.NoSuchProcess):
        family = [*process.children(recursive=True), process]
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.send_signal(signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=GRACE_S)
        for each in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()


def be_stage(stage: str, device: str, out: Path, part: tuple[int, int]) -> int:
    """Runs a part of a stage in this process."""
    from benchmarks.gpu.kit import Kit
    from zerotune.trial_lib.device.this_host import this_host
    from zerotune.trial_lib.launch.locks import host_lock_dir, own_folder

    report = reports.Report(out / f"{reports.name_of(stage, part)}.json", stage, device)
    host = this_host()
    if host.device != device:
        report.check("there is such a device", False, f"this host trains on {host.device}, and --device says {device}")
        return 1
    own_folder(host_lock_dir())
    work = Path(tempfile.mkdtemp(prefix="trials-"))
    kit = Kit(report, host, work, part)
    try:
        importlib.import_module(f"benchmarks.gpu.stages.{stage}").run(kit)
        report.end()
    except Exception:  # noqa: BLE001 - whatever it is, the report has to have it
        report.check("the stage comes to its end", False, traceback.format_exc(limit=-4))
        return 1
    finally:
        kit.close()
    return 0


def together(stages: Sequence[str], lanes: int) -> list[list[str]]:
    """Returns the stages in the order of their run; those of one list run at once."""
    groups: list[list[str]] = []
    for stage in stages:
        if lanes > 1 and stage in UNTIMED and groups and groups[-1][0] in UNTIMED:
            groups[-1].append(stage)
        else:
            groups.append([stage])
    return groups


def main() -> int:
    arguments = parse_arguments()
    out: Path = arguments.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    if arguments.stage:
        return be_stage(arguments.stage, arguments.device, out, tuple(arguments.part))
    ends_at = time.monotonic() + arguments.seconds
    for stages in together(arguments.stages, arguments.lanes):
        left = ends_at - time.monotonic()
        if left < GRACE_S:
            for stage in stages:
                reports.complete(out, stage, ended="not started: no time was left")
            continue
        print(f"{', '.join(stages)} ...", flush=True)
        run_stages(stages, arguments.device, out, left, arguments.lanes if stages[0] in UNTIMED else 1)
    text, is_well = reports.table(out, arguments.stages)
    (out / "table.txt").write_text(text + "\n")
    print(text, flush=True)
    return 0 if is_well else 1


if __name__ == "__main__":
    sys.exit(main())
