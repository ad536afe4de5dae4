"""Confirmation of a candidate whose data loader has other workers: their processor time is not the rank's."""

from typing import Any

import pytest

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.confirmation import Confirmation, Contender, Finding

TYPED = {"program": {"loader:num_workers": 0, "model:compile": False}}
CPU_SECONDS, WALL_SECONDS = {"own": 1.0, "other": 0.8}, {"own": 1.0, "other": 0.9}


def trial(key: str, number: int, purpose: Purpose = Purpose.CONFIRM) -> TrialResult:
    # The clock is so unsteady that it contains the gain by processor time.
    metrics = {
        "cpu_time_per_sample": CPU_SECONDS[key] * (1 + number % 3 / 1000),
        "throughput": 1 / (WALL_SECONDS[key] * (1 + number * 7 % 5 / 15)),
    }
    shared: dict[str, Any] = {"outcome": Outcome.COMPLETED, "losses": [2.0, 1.9], "phases": {"steps": 1.0}}
    return TrialResult(
        trial_id=f"s-{number}", number=number, purpose=purpose, config_hash=key, metrics=metrics, **shared
    )


def contender(key: str, **switches: Any) -> Contender:
    candidate = Candidate(
        knobs={"program": switches} if switches else {}, micro_batch_size=4, slots=1, data_parallel_size=1
    )
    return Contender(candidate, candidate.complete(TYPED), trial(key, 1, Purpose.SEARCH))


def found(**switches: Any) -> Finding:
    own, other = contender("own"), contender("other", **switches)
    confirmation = Confirmation(own, [other], "throughput", "cpu", search_seconds=60.0)
    number = 1
    while (candidate := confirmation.next) is not None:
        number += 1
        confirmation.tell(trial("own" if candidate is own.candidate else "other", number))
    return confirmation.finding()


@pytest.mark.parametrize("place", ["loader:num_workers", "--dataloader_num_workers", "conf/train.yaml:data.workers"])
def test_other_workers_are_compared_by_the_clock(place: str) -> None:
    assert found(**{place: 1}).quantity == "throughput"


def test_another_switch_is_compared_by_processor_time() -> None:
    assert found(**{"model:compile": True}).quantity == "processor time per sample"
