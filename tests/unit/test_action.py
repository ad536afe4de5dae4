"""`action.yml`: what its script makes of the exit codes of `zerotune tune`."""

import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
SLOWER = "REGRESSION: 61.2 samples/s, below the last known 101.9 samples/s: 0.60x (0.55 to 0.65)."


def run_action(folder: Path, code: int, answer: str) -> "subprocess.CompletedProcess[str]":
    """Runs the step that tunes, with a `zerotune` that prints its words and an answer, and ends with a code."""
    (folder / "answer").write_text(answer)
    fake = folder / "zerotune"
    fake.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > {folder}/words\ncat {folder}/answer\nexit {code}\n')
    fake.chmod(0o755)
    (step,) = (each for each in yaml.safe_load((ROOT / "action.yml").read_text())["runs"]["steps"] if "run" in each)
    environment = {
        **{"COMMAND": "deepspeed train.py --name 'two words'", "OPTIONS": "--max-minutes 20"},
        **{"ANSWER": str(folder / "zerotune.json"), "GITHUB_OUTPUT": str(folder / "output")},
        **{"GITHUB_STEP_SUMMARY": str(folder / "summary"), "PATH": f"{folder}:{os.environ['PATH']}"},
    }
    return subprocess.run(
        ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]],
        env=environment,
        capture_output=True,
        text=True,
    )


@pytest.mark.parametrize(
    ("code", "since", "said"),
    [(0, None, ""), (4, {"sentence": SLOWER}, f"::error title=Training is slower::{SLOWER}")],
)
def test_a_regression_fails_the_job_with_its_sentence(
    tmp_path: Path, code: int, since: dict[str, str] | None, said: str
) -> None:
    ended = run_action(tmp_path, code, json.dumps({"headline": "1.20x faster", "since_last": since}))
    assert ended.returncode == code, ended.stderr
    assert ended.stdout.strip() == said
    assert (tmp_path / "summary").read_text() == "1.20x faster\n"
    words = (tmp_path / "words").read_text().splitlines()
    assert words == [
        *("tune", "--from-earlier", "--json", "--max-minutes", "20", "--"),
        *("deepspeed", "train.py", "--name", "two words"),
    ]


def test_an_end_without_an_answer_fails_the_job_with_the_exit_code(tmp_path: Path) -> None:
    ended = run_action(tmp_path, 2, "")
    assert ended.returncode == 2
    assert "exit code 2" in ended.stdout
