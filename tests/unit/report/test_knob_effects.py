"""Which knobs are said to have mattered, of studies whose knobs do what is known."""

import random
from dataclasses import replace
from typing import Any

import pytest
from report_fixtures import recorded_study

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.report.knob_effects import KnobEffect, knob_effects
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_view import StudyView, TrialView

ZERO = "zero_optimization"
STAGE, OVERLAP, BUCKET = (f"{ZERO}.{name}" for name in ("stage", "overlap_comm", "reduce_bucket_size"))


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> StudyView:
    return read_study(recorded_study(tmp_path_factory.mktemp("study")).root)


def measured(
    view: StudyView, readings: list[tuple[dict[str, Any], int, float]], metric: str = "throughput"
) -> StudyView:
    """Returns a study of such trials: settings, micro-batch size, value of the metric."""
    template = next(trial for trial in view.trials if not trial.is_profile)
    trials = tuple(
        TrialView(**{**vars(template), "row": row, "settings": settings})
        for number, (settings, size, value) in enumerate(readings)
        for row in [
            template.row.model_copy(
                update={"trial": number, "micro_batch_size": size, "value": value, "purpose": Purpose.SEARCH}
            )
        ]
    )
    return replace(view, trials=trials, metric=metric)


def by_knob(effects: list[KnobEffect]) -> dict[str, KnobEffect]:
    return {effect.knob: effect for effect in effects}


def known(trials: int, noise: float, smaller_is_better: bool = False) -> list[tuple[dict[str, Any], int, float]]:
    """Returns trials of knobs with known effects: overlap 20 %, the bucket none, and the size its curve."""
    draw = random.Random(7)
    readings = []
    for _ in range(trials):
        overlap, bucket, size = draw.random() < 0.5, draw.choice([10, 20, 40]), draw.choice([1, 2, 4, 8, 16])
        value = 100 * (1.2 if overlap else 1.0) * size / (size + 4) * draw.lognormvariate(0, noise)
        settings = {STAGE: 2, OVERLAP: overlap, BUCKET: bucket}
        readings.append((settings, size, 1 / value if smaller_is_better else value))
    return readings


@pytest.mark.parametrize(("metric", "smaller"), [("throughput", False), ("latency", True)])
def test_a_knob_that_matters_is_told_from_one_that_does_not(recorded: StudyView, metric: str, smaller: bool) -> None:
    effects = by_knob(knob_effects(measured(recorded, known(40, 0.02, smaller), metric)))
    assert set(effects) == {"micro-batch", "overlap_comm", "reduce_bucket_size"}
    assert (effects["overlap_comm"].best, effects["overlap_comm"].worst) == ("true", "false")
    assert effects["overlap_comm"].low < 1.2 < effects["overlap_comm"].high
    assert effects["overlap_comm"].is_clear
    assert not effects["reduce_bucket_size"].is_clear
    assert (effects["micro-batch"].best, effects["micro-batch"].worst) == ("16", "1")
    assert effects["micro-batch"].low < 4.0 < effects["micro-batch"].high


def test_with_few_noisy_trials_nothing_is_clear(recorded: StudyView) -> None:
    effects = by_knob(knob_effects(measured(recorded, known(6, 0.3))))
    assert not effects["overlap_comm"].is_clear
    assert not effects["reduce_bucket_size"].is_clear


def test_intervals_hold_what_is_true_about_as_often_as_they_say(recorded: StudyView) -> None:
    held = 0
    for seed in range(40):
        draw = random.Random(seed)
        readings = []
        for _ in range(24):
            overlap, size = draw.random() < 0.5, draw.choice([2, 4, 8])
            value = (1.1 if overlap else 1.0) * size**0.3 * draw.lognormvariate(0, 0.05)
            readings.append(({OVERLAP: overlap}, size, value))
        effect = by_knob(knob_effects(measured(recorded, readings)))["overlap_comm"]
        held += effect.low <= (1.1 if effect.best == "true" else 1 / 1.1) <= effect.high
    assert held >= 33


def test_knobs_that_were_always_varied_together_are_one(recorded: StudyView) -> None:
    readings = [({STAGE: stage, BUCKET: stage * 10}, 4, 10.0 * stage) for stage in (1, 2) * 5]
    assert [effect.knob for effect in knob_effects(measured(recorded, readings))] == ["stage, reduce_bucket_size"]


def test_a_knob_that_only_some_trials_have_is_compared_among_those(recorded: StudyView) -> None:
    readings = [({STAGE: 1}, 4, 10.0)] * 4
    readings += [({STAGE: 3, BUCKET: bucket}, 4, 20.0 + bucket) for bucket in (1, 1, 10, 10)]
    effect = by_knob(knob_effects(measured(recorded, readings)))["reduce_bucket_size"]
    assert (effect.best, effect.worst, effect.values) == ("10", "1", 2)
    assert effect.gain < 1.6


@pytest.mark.parametrize("trials", [0, 1, 4])
def test_too_few_trials_say_nothing(recorded: StudyView, trials: int) -> None:
    assert knob_effects(measured(recorded, known(trials, 0.02))) == []


def test_trials_that_differ_in_nothing_say_nothing(recorded: StudyView) -> None:
    assert knob_effects(measured(recorded, [({STAGE: 1}, 4, 10.0 + n) for n in range(8)])) == []


def test_a_stage_that_was_measured_twice_as_fast_reads_so(recorded: StudyView) -> None:
    """Whatever else the study has tried: two trials that differ in the stage alone say what it is worth."""
    prefetch = f"{ZERO}.stage3_prefetch_bucket_size"
    readings: list[tuple[dict[str, Any], int, float]] = [
        # A bucket beyond the model's size is as good as that size. Stage 1 does not read `prefetch`.
        ({STAGE: 3, BUCKET: 1e9, prefetch: 5}, 8, 10.0),
        ({STAGE: 1, BUCKET: 10, prefetch: 7}, 8, 22.0),
        ({STAGE: 1, BUCKET: 5}, 8, 21.8),
        ({STAGE: 3}, 1, 4.0),
        ({STAGE: 3, BUCKET: 10, prefetch: 5}, 8, 9.9),
        ({STAGE: 1, BUCKET: 10}, 8, 22.1),
    ]
    view = replace(measured(recorded, readings), num_params=10)
    effects = by_knob(knob_effects(view))
    stage = effects["stage"]
    assert (stage.best, stage.worst, stage.times, stage.trials) == ("1", "3", "2.22x", (2, 2))
    assert stage.is_clear
    # What the user's configuration leaves open is the best guess of its arm.
    assert (effects["micro-batch"].times, effects["micro-batch"].trials) == ("2.49x", (2, 1))


def test_what_no_two_trials_show_alone_is_what_the_search_expects(recorded: StudyView) -> None:
    draw = random.Random(3)
    readings: list[tuple[dict[str, Any], int, float]] = []
    for stage, size in ((1, 2), (1, 8), (3, 4), (3, 16), (2, 1), (2, 32)):
        speed = 100 * (0.5 if stage == 3 else 1.0) * size / (size + 4)
        readings.append(({STAGE: stage}, size, speed * draw.lognormvariate(0, 0.01)))
    effects = by_knob(knob_effects(measured(recorded, readings)))
    assert effects["stage"].trials is None
    assert effects["stage"].source == "the model"
    assert effects["stage"].worst == "3"
    assert effects["stage"].low < 2.0 < effects["stage"].high
    assert effects["micro-batch"].trials == (1, 1)


def test_intervals_of_the_model_hold_what_is_true_about_as_often_as_they_say(recorded: StudyView) -> None:
    held = 0
    for seed in range(40):
        draw = random.Random(seed)
        readings: list[tuple[dict[str, Any], int, float]] = []
        for place in range(16):
            # No two trials differ in the stage alone.
            stage, size, bucket = draw.choice([1, 2]), 2 ** draw.randrange(5), 10 * (place + 1)
            speed = (1.2 if stage == 2 else 1.0) * size / (size + 3) * draw.lognormvariate(0, 0.04)
            readings.append(({STAGE: stage, BUCKET: bucket}, size, speed))
        effect = by_knob(knob_effects(measured(recorded, readings)))["stage"]
        assert effect.trials is None
        held += effect.low <= (1.2 if effect.best == "2" else 1 / 1.2) <= effect.high
    assert held >= 33


def test_a_value_that_helps_beside_one_knob_and_hurts_beside_another_is_not_clear(recorded: StudyView) -> None:
    readings = [
        ({STAGE: stage, OVERLAP: overlap}, 4, 100.0 * (1.3 if overlap is (stage == 1) else 1.0))
        for stage in (1, 2)
        for overlap in (True, False)
        for _ in range(2)
    ]
    assert not by_knob(knob_effects(measured(recorded, readings)))["overlap_comm"].is_clear
