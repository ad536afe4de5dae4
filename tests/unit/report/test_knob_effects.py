"""Which knobs are said to have mattered, of studies whose knobs do what is known."""

import random
from dataclasses import replace
from typing import Any

import pytest
from report_fixtures import recorded_study

from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.report.read_study import read_study
from zerotune.trial_lib.report.study_view import StudyView, TrialView
from zerotune.trial_lib.report.tables import KnobEffect, knob_effects

STAGE, OVERLAP, BUCKET = (f"zero_optimization.{name}" for name in ("stage", "overlap_comm", "reduce_bucket_size"))


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
