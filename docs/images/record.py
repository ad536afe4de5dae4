"""Records the study that the README's pictures show: `python docs/images/record.py`, on two ranks in some minutes.

The study tunes the example, from a configuration that fills its global batch by accumulation, and keeps that batch.
Paths and the host's name are replaced; figures keep six digits.
"""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]
STUDY = HERE / "study"
BATCH = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 16}
COMMAND = "deepspeed --num_gpus 2 train.py --deepspeed_config ds_config.json"
SHOWN_FOLDER, SHOWN_HOST = "/home/user/my-model", "node-1"
FILES = (
    "best_command.txt",
    "best_ds_config.json",
    "best_ds_metrics.json",
    "experiment.yaml",
    "history.jsonl",
    "profile.json",
    "study.json",
)


def main() -> None:
    """Runs the study and keeps what its report is made of."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder).resolve() / "my-model"
        shutil.copytree(REPOSITORY / "examples" / "hello_deepspeed", model)
        config = json.loads((model / "ds_config.json").read_text())
        (model / "ds_config.json").write_text(json.dumps({**config, **BATCH}, indent=2))
        zerotune = Path(sys.executable).with_name("zerotune")
        command = [zerotune, "tune", "--max-trials", "30", "--", *COMMAND.split()]
        subprocess.run(command, cwd=model, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, check=True)
        [record] = model.glob("zerotune-studies/*/study.json")
        study = record.parent
        shutil.rmtree(STUDY, ignore_errors=True)
        STUDY.mkdir()
        for name in FILES:
            text = (study / name).read_text()
            if name == "history.jsonl":
                # The logs' paths are read as ones within the study.
                text = text.replace(f"{study}/", "")
            text = text.replace(str(model), SHOWN_FOLDER).replace(f'"{socket.gethostname()}"', f'"{SHOWN_HOST}"')
            (STUDY / name).write_text(_short(name, text))


def _short(name: str, text: str) -> str:
    if name.endswith(".jsonl"):
        events = [_rounded(json.loads(line)) for line in text.splitlines()]
        for event in events:
            # Four thousand names of modules, which no picture shows.
            event.get("result", {}).pop("imported", None)
        return "".join(f"{json.dumps(event)}\n" for event in events)
    if not name.endswith(".json"):
        return text
    document = _rounded(json.loads(text))
    # It names this machine's disk.
    document.pop("whereabouts", None)
    return json.dumps(document, indent=1) + "\n"


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _rounded(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_rounded(each) for each in value]
    # Seconds since the epoch need theirs.
    return float(f"{value:.6g}") if isinstance(value, float) and abs(value) < 1e9 else value


if __name__ == "__main__":
    main()
