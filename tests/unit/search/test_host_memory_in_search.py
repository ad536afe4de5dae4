"""What a search does about the memory of a host to which some of its arms offload."""

from dataclasses import replace

import pytest
from adaptive_world import PROFILE, SPACE, SimulatedModel, adaptive, drive, ended, problem, trials

from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.knobs import get_knob

DEVICE = "zero_optimization.offload_optimizer.device"
NO_ROOM = replace(PROFILE, host_mem=1_000_000)
# Nothing but offload fits onto the device.
OFFLOAD_ALONE = [arm for arm in SPACE.arms if get_knob(arm.knobs, DEVICE)]


def offloads(candidate: Candidate) -> bool:
    return get_knob(candidate.knobs, DEVICE) is not None


class HostOutOfMemory(SimulatedModel):
    """Every trial that offloads runs out of the host's memory."""

    def run(self, candidate: Candidate):
        return ended(Outcome.OUT_OF_HOST_MEMORY) if offloads(candidate) else super().run(candidate)


def asked(search, model=None):
    return [candidate for candidate, _ in trials(drive(search, (model or SimulatedModel()).run))]


def test_an_arm_that_the_host_has_no_room_for_is_not_asked_for():
    settings = {"min_gain": 0, "max_trials": 24}
    assert any(map(offloads, asked(adaptive(problem(), **settings))))
    assert not any(map(offloads, asked(adaptive(problem(profile=NO_ROOM), **settings))))


@pytest.mark.long
def test_on_a_cpu_the_figure_means_nothing():
    settings = {"min_gain": 0, "max_trials": 24}
    with_figure = asked(adaptive(problem(profile=NO_ROOM, device="cpu"), **settings))
    assert with_figure == asked(adaptive(problem(device="cpu"), **settings))
    assert any(map(offloads, with_figure))


def test_it_is_not_asked_for_even_where_nothing_else_is_left():
    space = SPACE.of_arms(OFFLOAD_ALONE)
    assert asked(adaptive(problem(space=space, profile=NO_ROOM))) == []
    assert asked(adaptive(problem(space=space)))


@pytest.mark.parametrize("can_sweep", [False, True])
def test_after_one_that_ran_out_of_it_the_arm_is_left_and_no_other_arm_is_smaller(can_sweep):
    settings = {"min_gain": 0, "max_trials": 24}
    search = adaptive(problem(can_sweep=can_sweep), **settings)
    history = trials(drive(search, HostOutOfMemory().run))
    failed = [candidate for candidate, result in history if result.outcome is Outcome.OUT_OF_HOST_MEMORY]
    assert len(failed) == 1
    largest = max(candidate.micro_batch_size for candidate, _ in history if not offloads(candidate))
    without = trials(drive(adaptive(problem(profile=NO_ROOM, can_sweep=can_sweep), **settings), SimulatedModel().run))
    assert largest >= max(candidate.micro_batch_size for candidate, _ in without)
