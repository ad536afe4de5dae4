"""A recorded grid over layouts: each candidate counts its own replicas."""

from pathlib import Path

import pytest
from study_fixtures import Zerotune

from benchmarks.replay.recorded import read_table
from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.knobs import get_knob

pytestmark = pytest.mark.alone

PROGRAM = Path(__file__).parents[1] / "programs" / "divided"
EXPERIMENT = """
name: divided
entrypoint: deepspeed train.py --deepspeed_config ds_config.json
hyperparameters: {deepspeed_config: ds_config.json}
resources: {slots_per_trial: 2}
search_space:
  tensor_parallel.autotp_size: [1, 2]
  zero_optimization.reduce_bucket_size: 100000
  zero_optimization.allgather_bucket_size: 100000
"""


@pytest.mark.long
def test_a_grid_measures_groups_and_replicas_side_by_side(tmp_path: Path, home: Path) -> None:
    zerotune = Zerotune(tmp_path, home, slots=2)
    zerotune.config.write_text(EXPERIMENT)
    ended = zerotune.record(PROGRAM, "-z", "1", "-b", "4", "--repeats", "1")
    assert ended.returncode == 0, ended.stderr
    rows = [row for of_candidate in read_table(tmp_path / "table.jsonl").rows.values() for row in of_candidate]
    assert {row.outcome for row in rows} == {Outcome.COMPLETED}
    replicas = {(get_knob(row.candidate.knobs, AUTOTP, 1), row.candidate.data_parallel_size) for row in rows}
    assert replicas == {(1, 2), (2, 1)}
    for row in rows:
        samples = row.metrics["throughput"] * row.metrics["latency"]
        assert samples == pytest.approx(row.candidate.micro_batch_size * (row.candidate.data_parallel_size or 0))
