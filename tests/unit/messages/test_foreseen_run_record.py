import json

import pytest

from zerotune.trial_lib.messages.foreseen_run import Ask, ForeseenRun, MemoryEvent, Moment, Operation, Storage

RUN = ForeseenRun(
    world=8,
    dtypes=("bfloat16",),
    storages=(
        Storage(512, 0, 0),
        Storage(1024, 3, 1),
    ),
    events=(
        MemoryEvent(0, 1),
        MemoryEvent(1, 1),
        MemoryEvent(1, 0),
    ),
    moments=(
        Moment(0, 0, 0, 0, 0),
        Moment(2, 1, 0, 1, 0),
    ),
    operations=(
        Operation(0, 0, 2e9, 1e6),
        Operation(11, 0, 0.0, 1e6, ranks=8),
    ),
    asks=(Ask(asker="train (train.py:12)", question="item", answer="1.0", is_known=False, count=2),),
)


def test_a_run_comes_back_from_its_file_as_it_was() -> None:
    assert ForeseenRun.from_json(json.loads(json.dumps(RUN.to_json()))) == RUN


def test_a_record_of_another_version_is_refused() -> None:
    with pytest.raises(TypeError, match="unheard_of"):
        ForeseenRun.from_json({**RUN.to_json(), "unheard_of": 1})
    assert ForeseenRun.from_json({**RUN.to_json(), "process_bytes": 1}) == RUN


def test_the_record_of_a_pipeline_that_lacks_its_stages_is_refused() -> None:
    record = RUN.to_json()
    del record["pipeline_stages"]
    assert ForeseenRun.from_json(record) == RUN
    with pytest.raises(TypeError, match="how many stages"):
        ForeseenRun.from_json({**record, "is_pipeline": True})
