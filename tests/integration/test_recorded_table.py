"""A recorded table: a whole grid measured into one file, which is resumed where it was cut short."""

import json
import subprocess
from pathlib import Path

import pytest
from study_fixtures import Zerotune

from benchmarks.replay.recorded import read_table
from zerotune.trial_lib.records.result import Outcome

SPACE = """
search_space:
  zero_optimization.reduce_bucket_size: 3656
  zero_optimization.contiguous_gradients: [true, false]
"""

pytestmark = [pytest.mark.alone, pytest.mark.long]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home, program="--largest_micro_batch 4")
    zerotune.config.write_text(zerotune.config.read_text() + SPACE)
    return zerotune


def record(zerotune: Zerotune, *more: str) -> subprocess.CompletedProcess[str]:
    return zerotune.record(zerotune.model, "-z", "0", "1", *more)


def test_every_family_is_measured_at_every_size_and_what_fails_once(zerotune: Zerotune) -> None:
    ended = record(zerotune, "-b", "2", "8", "--repeats", "2")
    assert ended.returncode == 0, ended.stderr
    table = read_table(zerotune.folder / "table.jsonl")
    assert len(table.rows) == (1 + 2) * 2
    for rows in table.rows.values():
        small = rows[0].candidate.micro_batch_size == 2
        assert {row.outcome for row in rows} == {Outcome.COMPLETED if small else Outcome.OUT_OF_MEMORY}
        assert [row.repeat for row in rows] == ([0, 1] if small else [0])
    assert not (zerotune.folder / "zerotune-studies").exists()


def test_a_resumed_recording_measures_what_is_missing(zerotune: Zerotune) -> None:
    path = zerotune.folder / "table.jsonl"
    assert record(zerotune, "-b", "2", "--repeats", "1").returncode == 0
    before = path.read_text()
    ended = record(zerotune, "-b", "2", "4", "--repeats", "1")
    assert ended.returncode == 0, ended.stderr
    assert path.read_text().startswith(before)
    assert len(read_table(path).rows) == (1 + 2) * 2


def test_the_table_of_another_experiment_is_left_alone(zerotune: Zerotune) -> None:
    path = zerotune.folder / "table.jsonl"
    assert record(zerotune, "-b", "2", "--repeats", "1").returncode == 0
    before = path.read_text()
    config = json.loads((zerotune.model / "ds_config.json").read_text())
    (zerotune.model / "ds_config.json").write_text(json.dumps({**config, "gradient_clipping": 1.0}))
    ended = record(zerotune, "-b", "2", "--repeats", "1")
    assert ended.returncode == 2
    assert "table.jsonl: it belongs to another experiment" in ended.stderr
    assert path.read_text() == before
