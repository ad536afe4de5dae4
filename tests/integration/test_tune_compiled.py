"""Whole studies that vary compilation and attention: trials, answer, MLflow, report and training have the same."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from device_fixtures import TRAINER_FLAGS
from study_fixtures import Study, Zerotune, query

from zerotune.flows.prefect_server import PrefectServer
from zerotune.trial_lib.records.result import Outcome

pytestmark = [pytest.mark.alone, pytest.mark.long, pytest.mark.timeout(1500)]

PROGRAMS = Path(__file__).parents[1] / "programs"
OPTIONS = ("--json", "-z", "1", "--max-trials", "7", "--max-micro-batch", "4", "-m", "throughput")
MADE = re.compile(r"^step 1 graphs (\d+)", re.MULTILINE)
ATTENTION = re.compile(r"attention (\w+)")


@pytest.fixture
def zerotune(tmp_path: Path, home: Path, server: PrefectServer, empty_store: Path) -> Zerotune:
    found = Zerotune(tmp_path, home).on_servers(server.api_url, empty_store)
    found.environment["OMP_NUM_THREADS"] = "1"
    return found


def had(log: str) -> tuple[bool, str]:
    """Returns whether a log shows graphs in its first step, and its attention."""
    made, attention = MADE.search(log), ATTENTION.search(log)
    assert made is not None, log[-2000:]
    assert attention is not None
    return int(made[1]) > 0, attention[1]


def tried(study: Study, compile_: str, attention: str) -> set[tuple[bool, str]]:
    """Returns what the trials had, after a look whether each had what its candidate says."""
    seen = set()
    for number, result in study.results.items():
        if result.outcome not in (Outcome.COMPLETED, Outcome.TOO_SLOW):
            continue
        candidate = json.loads(study.paths.trial(number).candidate.read_text())
        knobs = candidate["knobs"].get("program", {})
        asked = bool(knobs.get(compile_)), knobs.get(attention) or "sdpa"
        # A size of a sweep runs in the process of the sizes before it, and has a log of its own.
        assert had(Path(result.logs[0]).read_text()) == asked, number
        seen.add(asked)
    return seen


def is_shown(zerotune: Zerotune, study: Study, places: tuple[str, str]) -> None:
    """Looks for the switches among MLflow's parameters and in the report."""
    keys = {key for (key,) in query(zerotune.folder / "mlflow.db", "select distinct key from params")}
    report = study.paths.report.read_text()
    for place in places:
        assert f"program.{place.replace(':', '_')}" in keys
        assert place in report


def test_a_llama_is_compiled_by_zerotune_in_trials_and_in_the_training(zerotune: Zerotune) -> None:
    shutil.copytree(PROGRAMS / "turned", zerotune.folder, dirs_exist_ok=True)
    places = ("model:compile", "model:attention")
    words = [word for place in places for word in ("--vary", place)]
    command = ("deepspeed", "--num_gpus", "1", "train.py", "--deepspeed_config", "ds_config.json", "--layers", "1")
    ended = zerotune.run("tune", *OPTIONS, *words, "--", *command, "--steps", "200", timeout=1200)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    study = zerotune.study
    assert tried(study, *places) >= {(False, "sdpa"), (True, "sdpa"), (True, "eager")}
    is_shown(zerotune, study, places)
    best = document["best"]["knobs"].get("program", {})
    wanted = bool(best.get("model:compile")), best.get("model:attention") or "sdpa"
    said = study.paths.best_command.read_text()
    assert ("engine.compile()" in said) == wanted[0]
    assert ('set_attn_implementation("eager")' in said) == (wanted[1] == "eager")
    trained = subprocess.run(
        ["sh", study.paths.best_command], cwd=zerotune.folder, env=zerotune.environment, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    logs = [log.read_text() for log in zerotune.folder.glob("zerotune-experiments/*/rank0.log")]
    assert had(logs[0] if logs else trained.stdout) == wanted


def test_a_trainer_is_compiled_by_its_own_options_in_trials_and_in_the_training(zerotune: Zerotune) -> None:
    for name in ("trainer_switches.py", "model.py", "ds_auto.json"):
        shutil.copy(PROGRAMS / "any" / name, zerotune.folder)
    command = ("trainer_switches.py", "--deepspeed", "ds_auto.json", "--output_dir", "out", "--max_steps", "200")
    typed = ("deepspeed", "--num_gpus", "1", *command, "--report_to", "none", *TRAINER_FLAGS)
    vary = ("--vary", "--torch_compile=true,false", "--vary", "--attn_implementation=sdpa,eager")
    ended = zerotune.run("tune", *OPTIONS, *vary, "--", *typed, timeout=1200)
    assert ended.returncode == 0, ended.stderr
    document: dict[str, Any] = json.loads(ended.stdout)
    study = zerotune.study
    places = ("--torch_compile", "--attn_implementation")
    assert tried(study, *places) >= {(False, "sdpa"), (True, "sdpa"), (True, "eager")}
    is_shown(zerotune, study, places)
    best = document["best"]["knobs"].get("program", {})
    trained = subprocess.run(
        ["sh", study.paths.best_command], cwd=zerotune.folder, env=zerotune.environment, capture_output=True, text=True
    )
    assert trained.returncode == 0, trained.stderr
    assert had(trained.stdout) == (bool(best.get("--torch_compile")), best.get("--attn_implementation") or "sdpa")
