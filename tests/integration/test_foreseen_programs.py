"""Programs as people write them are foreseen: a raw loop, the Trainer, Accelerate, trial classes, and what they use.

`benchmarks/foresee/program_list.py` has them all. The table of outcomes is benchmarks/results/foreseen_programs.json.
"""

import json

import pytest
from case_fixtures import quick_first

from benchmarks.foresee.program_list import Foreseeable, all_programs
from benchmarks.foresee.programs import RESULT, foresee_row, peaks
from zerotune.trial_lib.messages.foreseen_run import KINDS, OPERATIONS, PLACES
from zerotune.trial_lib.plan.devices import Cluster, known_devices
from zerotune.trial_lib.plan.step_time import planned_step

ROWS = {row.name: row for row in all_programs()}
# One of each way in which a training is written, as many as fit a minute.
SHORT = ("any/accelerated.py", "examples/gan_two_engines", "experts.py --ep_size 2", "pipeline.py")
CANNOT = {name for name, row in ROWS.items() if row.is_no_training}


def expect_foreseen(row: Foreseeable, foreseeing_starter) -> None:
    run = foresee_row(row, foreseeing_starter)
    assert run.stopped == ""
    assert run.micro_batch > 0
    assert peaks(run)["device"] > 0
    kinds = {KINDS[each.kind] for each in run.storages}
    assert {"parameter", "gradient", "optimizer", "activation"} <= kinds
    done = {OPERATIONS[each.kind] for each in run.operations}
    assert {"matmul", "update"} & done


@pytest.mark.parametrize("name", SHORT)
def test_a_training_of_each_kind_is_foreseen(name, foreseeing_starter):
    expect_foreseen(ROWS[name], foreseeing_starter)


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in ROWS if name not in SHORT and name not in CANNOT])
def test_every_training_is_foreseen(name, foreseeing_starter):
    expect_foreseen(ROWS[name], foreseeing_starter)


@pytest.mark.parametrize("name", quick_first(1, ["any/trainer.py", "examples/lightning"]))
def test_the_length_of_the_whole_training_is_that_of_its_trainer(name, foreseeing_starter):
    """Of the Hugging Face Trainer and of Lightning. In a trial both train for longer."""
    run = foresee_row(ROWS[name], foreseeing_starter)
    assert (run.stopped, run.program["whole_steps"]) == ("", 60)


@pytest.mark.long
def test_ranks_that_share_a_sample_are_of_one_replica(foreseeing_starter):
    """ZeRO partitions over all of them. A step sends the tokens of a sample around, and reduces gradients."""
    run = foresee_row(ROWS["sequences.py --sequence-ranks 2"], foreseeing_starter)
    assert (run.stopped, run.world, run.replicas, run.sequence_ranks, run.zero_ranks) == ("", 8, 4, 2, 8)
    assert run.tokens == 16
    groups = {(OPERATIONS[each.kind], each.ranks) for each in run.operations if each.ranks > 1}
    assert {("all_to_all", 2), ("all_gather", 8)} <= groups
    parts = planned_step(run, Cluster(device=known_devices()["h100-80gb"], hosts=1, per_host=8)).parts
    assert parts["exchanging"] > 0
    assert parts["reducing"] > 0


def test_an_offloaded_optimizer_is_on_the_host(foreseeing_starter):
    run = foresee_row(ROWS["transformer.py stage 2, optimizer offloaded"], foreseeing_starter)
    optimizer, device = KINDS.index("optimizer"), PLACES.index("device")
    states = [each for each in run.storages if each.kind == optimizer]
    assert states
    assert all(each.place != device for each in states if each.size > 1024)
    moved = {OPERATIONS[each.kind] for each in run.operations}
    assert {"to_host", "to_device"} <= moved
    assert any(each.on_host for each in run.operations if OPERATIONS[each.kind] == "update")


def test_the_table_has_every_program():
    table = json.loads(RESULT.read_text())
    assert [line["program"] for line in table] == list(ROWS)
    assert [line["program"] for line in table if not line["is_foreseen"] and not line["why_not"]] == []
