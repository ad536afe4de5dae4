"""Tunes a program with a switch that matters and one that changes nothing: how often is only the first kept?

    python -m benchmarks.confirm_aa.planted --studies 3

Real studies on two real ranks. The program computes each forward pass twenty times more with `--twice`, and only prints
the variable OWN. It is typed with `--twice` and without the variable. Every candidate has a value of the variable, so
the search's winner has it too, and only the rounds that weigh the winner's changes can drop it.
"""

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "planted_switch.json"
PROGRAM = ROOT / "tests" / "programs" / "switched"
TYPED = "deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json --twice model.layers=12"
VARIED = ("--twice=true,false", "OWN={values: [b, c], coarse: false}")


def studied(folder: Path) -> dict[str, Any]:
    """What one study says of both switches."""
    shutil.copytree(PROGRAM, folder, ignore=shutil.ignore_patterns("__pycache__"))
    options = ["--json", "-z", "1", "--max-trials", "4", "--max-micro-batch", "8", "-m", "throughput"]
    words = [word for switch in VARIED for word in ("--vary", switch)]
    variables = {"XDG_DATA_HOME": str(folder.parent / "home"), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    begun = time.monotonic()
    ended = subprocess.run(
        [Path(sys.executable).with_name("zerotune"), "tune", *options, *words, "--", *TYPED.split()],
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
    )
    if ended.returncode:
        return {"failed": ended.stderr[-2000:]}
    document = json.loads(ended.stdout)
    finding, command = document["confirmation"], document["command"]
    return {
        "matters is in the answer": "--twice" not in command,
        "planted is in the answer": "OWN=" in command,
        "sentence": finding["sentence"],
        "worths": finding["worths"],
        "unweighed": finding["unweighed"],
        "rounds": finding["rounds"],
        "weighed_in": finding["weighed_in"],
        "command": command,
        "seconds": round(time.monotonic() - begun, 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=3, help="further studies; those of the file stay")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    each = json.loads(options.out.read_text())["each"] if options.out.exists() else []
    for _ in range(options.studies):
        with tempfile.TemporaryDirectory(prefix="planted-") as work:
            each.append(studied(Path(work) / "program"))
        print(json.dumps(each[-1]), flush=True)
        answered = [one for one in each if "failed" not in one]
        found = [one for one in answered if one["matters is in the answer"]]
        report = {
            "machine": platform.processor() or platform.machine(),
            "studies": len(each),
            "failed": len(each) - len(answered),
            "the answer has the switch that matters": len(found),
            "and not the planted one": sum(not one["planted is in the answer"] for one in found),
            "each": each,
        }
        options.out.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
