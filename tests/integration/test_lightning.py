"""Lightning's DeepSpeedStrategy, which starts its second rank itself when it is typed as `python train.py`."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import PROGRAMS
from study_fixtures import Zerotune

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome

pytestmark = pytest.mark.alone

TRAIN = ["python", "train.py", "--batch_size", "8", "--accumulate", "2"]


@pytest.fixture
def zerotune(tmp_path: Path, home: Path) -> Zerotune:
    zerotune = Zerotune(tmp_path, home)
    zerotune.folder = PROGRAMS.parents[1] / "examples" / "lightning"
    (tmp_path / "code").mkdir()
    script = tmp_path / "code" / "train.py"
    script.write_text((zerotune.folder / "train.py").read_text())
    zerotune.folder = script.parent
    return zerotune


@pytest.mark.long
@pytest.mark.devices(2)
@pytest.mark.timeout(900)
def test_a_lightning_training_is_tuned_as_it_is_typed(zerotune: Zerotune) -> None:
    plain = subprocess.run(
        [sys.executable, *TRAIN[1:]],
        cwd=zerotune.folder,
        env=zerotune.environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    found = re.search(r"engine (\d+) (\d+) (\d+)", plain.stdout)
    assert found, plain.stdout
    micro_batch, accumulation, train_batch = map(int, found.groups())
    assert (micro_batch, accumulation, train_batch) == (8, 2, 32)

    mapping = "train_micro_batch_size_per_gpu=--batch_size"
    ended = zerotune.run("tune", "--max-trials", "3", "--json", "--map", mapping, "--", *TRAIN, timeout=550)
    assert ended.returncode == 0, ended.stderr
    assert "starts `torchrun --nproc_per_node 2 train.py --batch_size 8 --accumulate 2`" in ended.stderr
    study = zerotune.study
    submitted = next(result for result in study.results.values() if result.purpose is Purpose.SUBMITTED)
    assert submitted.outcome is Outcome.COMPLETED, submitted.reason
    assert len(submitted.logs) == 2
    config = json.loads(study.paths.trial(submitted.number).ds_config.read_text())
    kept = [config.get(name) for name in ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps")]
    assert kept == [micro_batch, accumulation]
    # Each round of the confirmation trains on other samples of Lightning's loader.
    rounds = [result for result in study.results.values() if result.purpose is Purpose.CONFIRM]
    assert all(result.data_places for result in rounds)
    assert len({result.data_offset for result in rounds}) > 1
