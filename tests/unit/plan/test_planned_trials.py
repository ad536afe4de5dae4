"""How far off a plan was, in figures and in a sentence."""

import pytest

from zerotune.trial_lib.plan.plan_record import PlannedTrial, PlannedTrials

GIB = 2**30


def trial(number, memory=(10.0, 10.0), speed=(None, None)):
    foreseen, measured = memory
    return PlannedTrial(
        number=number,
        label="z2",
        micro_batch=4,
        memory=foreseen * GIB,
        measured_memory=None if measured is None else measured * GIB,
        samples_per_s=speed[0],
        measured_samples_per_s=speed[1],
    )


def planned(*trials, is_here=True):
    return PlannedTrials(plan_id="llama-1", devices="h100-80gb:8", is_here=is_here, trials=trials)


def test_the_sentence_says_memory_and_speed():
    found = planned(trial(1, (10.6, 10.0), (122.0, 100.0)), trial(2, (8.8, 10.0), (61.0, 50.0)), trial(3, (10.2, 10.0)))
    assert found.sentence == "The plan was 6 % off in memory at the median (worst 12 %) and 22 % too fast."
    assert found.memory_errors == pytest.approx([0.06, 0.12, 0.02])
    assert found.speed_error == pytest.approx(0.22)


@pytest.mark.parametrize(
    ("trials", "said"),
    [
        ([trial(1, (10.0, None))], "No trial that the plan foresaw has completed"),
        ([], "No trial that the plan foresaw has completed"),
        ([trial(1, (9.0, 10.0), (80.0, 100.0))], "The plan was 10 % off in memory and 20 % too slow."),
        ([trial(1, (10.0, 10.0), (100.1, 100.0))], "The plan was under 1 % off in memory and right in speed."),
        ([trial(1, (10.0, None), (150.0, 100.0))], "The plan was 50 % too fast."),
    ],
)
def test_it_says_no_more_than_was_measured(trials, said):
    assert planned(*trials).sentence.startswith(said)


def test_of_a_plan_for_other_devices_no_speed_is_compared():
    said = planned(trial(1, (11.0, 10.0), (None, 50.0)), is_here=False).sentence
    assert said == (
        "The plan was 10 % off in memory. It was for h100-80gb:8, which this host does not have, so speeds are not "
        "compared."
    )


def test_a_study_without_a_plan_has_no_file(tmp_path):
    file = tmp_path / "planned_trials.json"
    assert PlannedTrials.in_file(file) is None
    file.write_text("{")
    assert PlannedTrials.in_file(file) is None
    file.write_text(planned(trial(1)).model_dump_json())
    assert PlannedTrials.in_file(file) == planned(trial(1))
