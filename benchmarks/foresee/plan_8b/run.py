"""Measures a plan for a Llama of 8 billion parameters: seconds, memory, and the share of each part."""

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "foresee_plan_8b.json"
HERE = Path(__file__).parent
COMMAND = ("--", "deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds_config.json")


def measured(words: list[str], folder: Path) -> dict[str, object]:
    """Runs the command as a user types it, and returns what it took and found."""
    for name in ("train.py", "ds_config.json"):
        shutil.copy(HERE / name, folder)
    zerotune = Path(sys.executable).with_name("zerotune")
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    ended = subprocess.run([zerotune, "plan", *words, "--json", *COMMAND], cwd=folder, capture_output=True, text=True)
    seconds, after = time.monotonic() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    if ended.returncode not in (0, 1) or not ended.stdout:
        sys.exit(ended.stderr)
    plan = json.loads(ended.stdout)
    cpu = (after.ru_utime + after.ru_stime) - (before.ru_utime + before.ru_stime)
    return {
        "command": " ".join(["zerotune plan", *words, *COMMAND]),
        "host": {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0))},
        "load_before": os.getloadavg()[0],
        "seconds": round(seconds, 1),
        "cpu_seconds": round(cpu, 1),
        "shares_s": {name: round(value, 1) for name, value in plan["shares"].items()},
        "peak_mib_of_a_run": round(plan["peak_bytes"] / 2**20),
        "peak_mib_of_the_largest_process": round(after.ru_maxrss / 2**10),
        "parameters": plan["parameters"],
        "runs": len(list(Path(plan["folder"]).glob("runs/*"))),
        "answer": plan["answer"],
        "arms": [
            {
                "arm": arm["label"],
                "fits": round(arm["fits"], 3),
                "micro_batch": arm["micro_batch"],
                "largest_micro_batch": arm["largest_micro_batch"],
                "peak_gib": round(arm["peak"]["value"] / 2**30, 1),
                "samples_per_s": None if arm["samples_per_s"] is None else round(arm["samples_per_s"]["value"], 2),
            }
            for arm in plan["devices"][0]["arms"]
        ],
        "versions": plan["versions"],
    }


def main() -> None:
    """Runs it and writes the result."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--on", default="h100-80gb:8")
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        result = measured(["--on", arguments.on], Path(folder))
    arguments.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps({name: value for name, value in result.items() if name != "arms"}, indent=2))


if __name__ == "__main__":
    main()
