"""A study that turns switches in a program: its trials have them, and so has the training that follows."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from study_fixtures import Zerotune

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

TURNED = Path(__file__).parents[1] / "programs" / "turned"
COMMAND = ("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json", "--recompute")
SHOWN = re.compile(r"recomputed (\d+) loss")
PLACE = "model:activation_checkpointing"
LAYERS = {"none": "0", "full": "4", None: "4"}


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    found = Zerotune(tmp_path, home).on_servers(server.api_url, empty_store)
    shutil.copytree(TURNED, tmp_path, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__"))
    found.environment["OMP_NUM_THREADS"] = "1"
    return found


@pytest.mark.long
@pytest.mark.timeout(900)
def test_checkpointing_that_costs_time_is_turned_off_in_trials_and_in_the_training(zerotune: Zerotune) -> None:
    options = ("--json", "-z", "0", "--max-trials", "5", "--max-micro-batch", "4", "-m", "throughput")
    words = ("--vary", f"{PLACE}=none,full", "--vary", "model:compile=false")
    ended = zerotune.run("tune", *options, *words, "--", *COMMAND, timeout=800)
    assert ended.returncode == 0, ended.stderr
    document, study = json.loads(ended.stdout), zerotune.study
    found = set()
    for number, result in study.results.items():
        if result.outcome in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            candidate = json.loads(study.paths.trial(number).candidate.read_text())
            kind = candidate["knobs"].get("program", {}).get(PLACE)
            found.add(kind)
            assert set(SHOWN.findall(Path(result.logs[0]).read_text())) == {LAYERS[kind]}
    assert "none" in found
    assert document["best"]["knobs"]["program"][PLACE] == "none"
    assert document["gain_interval"][0] > 1
    assert "gradient_checkpointing_disable()" in study.paths.best_command.read_text()
    environment = zerotune.environment
    trained = subprocess.run(
        ["sh", study.paths.best_command], cwd=zerotune.folder, env=environment, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    (log,) = zerotune.folder.glob("zerotune-experiments/*/rank0.log")
    assert set(SHOWN.findall(log.read_text())) == {"0"}
