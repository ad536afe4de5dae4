"""`zerotune show`, as people and programs call it."""

import json
import subprocess
from pathlib import Path

import pytest
from case_fixtures import quick_first
from plan_fixtures import plan_folder
from report_fixtures import STUDY_ID, recorded_study, study_with_failures
from study_fixtures import BIN, run_here


def show(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run_here(folder, "show", *arguments, COLUMNS="120")


def test_the_tables_have_the_answer_first_and_every_trial(tmp_path: Path) -> None:
    study_with_failures(tmp_path)
    shown = show(tmp_path)
    assert (shown.returncode, shown.stderr) == (0, "")
    lines = shown.stdout.splitlines()
    answer = "2.53x faster than your configuration (95 % CI 2.19 to 2.92): ZeRO 0, micro-batch 64, accumulation 2"
    assert lines[0] == answer
    # What can be copied is in one line.
    assert any(line.startswith("deepspeed --num_gpus 2") and line.endswith("--steps 200") for line in lines)
    for title in ("measured again in fresh processes", "trials", "did not complete", "which knobs mattered"):
        assert title in {line.strip() for line in lines}
    for number in range(38):
        assert any(line.split()[0] == f"{number:04d}" for line in lines if line.strip())
    # It has ended, so the trial that it asked for last does not run.
    assert not any(line.startswith("running:") for line in lines)


def test_a_program_gets_all_of_it(tmp_path: Path) -> None:
    recorded_study(tmp_path)
    command = [BIN / "zerotune", "show", STUDY_ID, "--json"]
    shown = subprocess.run(command, cwd=tmp_path, text=True, capture_output=True, check=True)
    document = json.loads(shown.stdout)
    assert (document["study"], document["status"], document["gain"]) == (STUDY_ID, "completed", 2.52588)
    assert document["best"]["trial"] == 28
    assert document["best_ds_config"]["zero_optimization"]["stage"] == 0
    assert len(document["trials"]) == 35
    assert document["trials"][0]["memory"]["measured"] > 0


def test_a_plan_is_shown_with_its_table_and_its_answer(tmp_path: Path) -> None:
    paths = plan_folder(tmp_path / "zerotune-plans" / "llama-1")
    answer = json.loads(paths.record.read_text())["answer"]
    for named in ("llama-1", str(paths.root)):
        shown = show(tmp_path, named)
        assert (shown.returncode, shown.stderr) == (0, "")
        assert answer in shown.stdout
        assert "h100-80gb:8, foreseen" in shown.stdout
    assert json.loads(show(tmp_path, "llama-1", "--json").stdout)["answer"] == answer
    paths.record.write_text("{")
    shown = show(tmp_path, "llama-1")
    assert (shown.returncode, shown.stderr.count("\n")) == (2, 1)


def test_a_study_that_was_cut_short_says_so(tmp_path: Path) -> None:
    recorded_study(tmp_path, status="running", ended_at=None)
    shown = show(tmp_path, "programs")
    assert shown.returncode == 0
    assert shown.stdout.startswith("Interrupted: 35 trials ended so far.")


@pytest.mark.parametrize("named", quick_first(1, ["no/such/folder", "nothing", "."]))
def test_what_is_no_study_is_bad_input(named: str, tmp_path: Path) -> None:
    shown = show(tmp_path, named)
    assert shown.returncode == 2
    assert shown.stdout == ""
    assert shown.stderr.startswith("zerotune: ")


@pytest.mark.long
def test_a_report_that_is_missing_is_written(tmp_path: Path) -> None:
    paths = recorded_study(tmp_path)
    assert not paths.report.exists()
    assert show(tmp_path).returncode == 0
    assert "<html" in paths.report.read_text()
