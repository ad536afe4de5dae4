"""What the adaptive search makes of ranks that are killed."""

from dataclasses import replace

from adaptive_world import SimulatedModel, adaptive, drive, ended, trials

from zerotune.trial_lib.records.result import Outcome

KILLED = replace(ended(Outcome.CRASHED), from_outside=True)


def test_a_trial_that_is_killed_from_outside_rules_nothing_out():
    model, killed = SimulatedModel(), []

    def run(candidate):
        if not killed:
            killed.append(candidate.key)
            return KILLED
        return model.run(candidate)

    history = drive(adaptive(min_gain=0, max_trials=41), run)
    family, size = killed[0]
    assert any(each == family and other >= size for each, other in [each.key for each, _ in trials(history)[1:]])


def test_a_candidate_that_is_killed_each_time_is_not_asked_for_a_third_time():
    model = SimulatedModel()

    def run(candidate):
        return KILLED if candidate.zero_stage == 2 else model.run(candidate)

    history = trials(drive(adaptive(min_gain=0, max_trials=41), run))
    keys = [candidate.key for candidate, result in history if result.outcome is Outcome.CRASHED]
    assert max(map(keys.count, keys)) == 2


def test_an_arm_whose_ranks_are_killed_at_large_sizes_is_tried_at_smaller_ones():
    model = SimulatedModel()

    def run(candidate):
        too_large = candidate.zero_stage == 2 and candidate.micro_batch_size > 8
        return KILLED if too_large else model.run(candidate)

    history = trials(drive(adaptive(min_gain=0, max_trials=41), run))
    killed, ran = (
        {candidate.family for candidate, result in history if result.outcome is outcome}
        for outcome in (Outcome.CRASHED, Outcome.COMPLETED)
    )
    assert killed & ran


def test_kills_at_large_sizes_of_two_arms_leave_the_smaller_sizes_of_all_to_be_searched():
    model = SimulatedModel()

    def run(candidate):
        return KILLED if candidate.micro_batch_size > 2 else model.run(candidate)

    history = trials(drive(adaptive(min_gain=0, max_trials=13), run))
    outcomes = [result.outcome for _, result in history]
    # The first kill says nothing. What is killed twice is believed of the next arm at once.
    killed = [candidate.micro_batch_size for candidate, result in history if result.outcome is Outcome.CRASHED]
    assert killed[0] == killed[1]
    assert outcomes.count(Outcome.COMPLETED) > len(killed)
