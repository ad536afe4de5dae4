"""A study over a recorded table, its driver killed twenty times: it ends as one that nobody has disturbed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

PROGRAM = Path(__file__).parents[1] / "table_study.py"
KILLS = 20
# A size that was left of a sweep is measured by another process group.
_OF_THE_GROUP = ("started_at", "phases", "swept")


def history(folder: Path) -> list[dict[str, Any]]:
    """Returns the lines of a folder's study, without its name and without what is when and where."""
    (root,) = folder.glob("zerotune-studies/*")
    text = (root / "history.jsonl").read_text().replace(str(root), "ROOT").replace(root.name, "ID")
    lines = [json.loads(line) for line in text.splitlines()]
    for line in lines:
        for name in _OF_THE_GROUP:
            line.get("result", {}).pop(name, None)
    return lines


@pytest.mark.parametrize(
    "method", ["adaptive", *(pytest.param(name, marks=pytest.mark.long) for name in ("asha", "binary", "random"))]
)
def test_a_study_that_is_killed_twenty_times_ends_with_the_history_of_an_undisturbed_one(
    tmp_path: Path, method: str
) -> None:
    command = [sys.executable, PROGRAM, tmp_path, method, str(KILLS), "7"]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=280)
    assert ran.returncode == 0, ran.stderr
    killed_at = json.loads(ran.stdout)
    assert len(killed_at) == KILLS
    whole = history(tmp_path / "whole")
    # All over the study, and not only at its beginning.
    assert len(set(killed_at)) > KILLS // 3
    assert killed_at[-1] > len(whole) / 4
    assert history(tmp_path / "killed") == whole
    told = [line["tell"] for line in whole if "tell" in line]
    assert len(told) == len(set(told)) > 10
