"""A recorded table over switches of the program: the replay's space has them as the recorded one had."""

import random

from small_table import HEAD, candidate, ran, table

from benchmarks.replay.table import TableWorld
from zerotune.trial_lib.records.switches import switches_of

ATTENTIONS, ALLOCATORS = ("sdpa", "eager"), ("default", "segments")


def switched(attention, allocator):
    return {
        "zero_optimization": {"stage": 1},
        "program": {"--attention": attention, "--gc": True, "ALLOCATOR": allocator, "OMP_NUM_THREADS": 2},
    }


def world(allocators=ALLOCATORS, allocator="segments"):
    grid = [switched(attention, allocator) for attention in ATTENTIONS for allocator in allocators]
    rows = [ran(knobs, 4, 100.0 + number, 100) for number, knobs in enumerate(grid)]
    own = {"--attention": "eager", "--gc": True, "ALLOCATOR": allocator, "OMP_NUM_THREADS": 2}
    recorded = table(*rows)
    recorded.head = HEAD.model_copy(update={"base_config": {**HEAD.base_config, "program": own}})
    return TableWorld(recorded)


def test_options_make_arms_and_variables_vary_within_each():
    space = world().problem.space
    assert space.coarse_switches == {"--attention", "--gc"}
    assert {switches_of(arm.knobs)["--attention"] for arm in space.arms} == set(ATTENTIONS)
    assert all(
        {knob.path for knob in arm.fine} == {"program.ALLOCATOR", "program.OMP_NUM_THREADS"} for arm in space.arms
    )
    assert all(set(arm.fine[0].values) == set(ALLOCATORS) for arm in space.arms)


def test_the_users_configuration_has_the_switches_as_typed():
    found = world()
    assert found.submitted == candidate(switched("eager", "segments"), 4)
    assert found.run(found.submitted, random.Random(0)).metrics["throughput"] > 0


def test_a_variable_that_the_users_command_does_not_set_stays_unset():
    found = world(allocators=("segments", None), allocator=None)
    assert found.submitted == candidate(switched("eager", None), 4)
