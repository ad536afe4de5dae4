"""A trial class on real ranks: checkpoints, resuming from them to the last bit, and pipelines."""

import json
from typing import Any

import pytest
from training_fixtures import DS_CONFIG, EXAMPLES, PIPELINE, Training, Trainings, hparams

# -- validation and checkpoints --------------------------------------------------------------------------------------


def test_it_validates_and_saves_when_it_is_due_and_at_the_end(trainings: Trainings) -> None:
    training = trainings.run(
        "Tiny", length={"batches": 7}, validation_period={"batches": 3}, checkpoint_period={"batches": 2}
    )
    assert list(training.metric("validation_loss", "validation")) == [3, 6, 7]
    saved = {record["batch"] for record in training.of_kind("checkpoint")}
    assert {2, 4, 6, 7} <= saved <= {2, 3, 4, 6, 7}
    assert training.finished is not None
    assert training.finished["latest_checkpoint"] == "batch-00000007"
    best = min(training.metric("validation_loss", "validation").items(), key=lambda pair: pair[1])
    assert training.finished["best_checkpoint"] == f"batch-{best[0]:08d}"
    assert training.finished["best_metric"] == best[1]
    assert {f"batch-{best[0]:08d}", "batch-00000007"} <= set(training.checkpoints)


@pytest.mark.parametrize(
    "validation", [pytest.param(None, marks=pytest.mark.long), {"batches": 4}], ids=["no period", "another period"]
)
def test_a_last_checkpoint_that_is_due_knows_how_good_it_is(
    trainings: Trainings, validation: dict[str, int] | None
) -> None:
    training = trainings.run(
        "Tiny", length={"batches": 10}, checkpoint_period={"batches": 5}, validation_period=validation
    )
    at_the_end = training.metric("validation_loss", "validation")[10]
    last = [record for record in training.of_kind("checkpoint") if record["batch"] == 10]
    assert [record["metric"] for record in last] == [at_the_end]
    assert training.finished is not None
    assert training.finished["best_metric"] == min(training.metric("validation_loss", "validation").values())


def test_a_metric_that_the_validation_does_not_have_is_told_and_costs_nothing(trainings: Trainings) -> None:
    training = trainings.run("Tiny", metric="accuracy")
    assert training.succeeded
    assert "the validation metrics (validation_loss) have no accuracy" in training.notes[0]
    assert training.finished is not None
    assert training.finished["best_checkpoint"] is None


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_a_killed_training_resumes_with_the_same_losses_to_the_last_bit(trainings: Trainings, stage: int) -> None:
    config = {**DS_CONFIG, "zero_optimization": {**DS_CONFIG["zero_optimization"], "stage": stage}}
    options: dict[str, Any] = {
        "slots": 2,
        "ds_config": config,
        "length": {"batches": 9},
        "validation_period": {"batches": 4},
        "checkpoint_period": {"batches": 3},
    }
    whole = trainings.run("DrawsEverywhere", "whole", hparams=hparams(trainings, "whole"), **options)
    values = hparams(trainings, "killed", dies_at=7)
    killed = trainings.run("DrawsEverywhere", "killed", hparams=values, **options)
    assert whole.succeeded, whole.logs[0]
    assert not killed.succeeded
    assert max(killed.metric("loss")) == 7
    resumed = trainings.run("DrawsEverywhere", "killed", hparams=values, **options)
    assert resumed.succeeded, resumed.logs[0]
    assert [record["batch"] for record in resumed.of_kind("training")] == [*range(1, 8), 7, 8, 9]
    assert resumed.metric("loss") == whole.metric("loss")
    assert resumed.metric("validation_loss", "validation") == whole.metric("validation_loss", "validation")


@pytest.mark.long
def test_a_training_of_two_engines_resumes_with_the_same_losses(trainings: Trainings) -> None:
    example = EXAMPLES / "gan_two_engines"
    config = json.loads((example / "ds_config.json").read_text())

    def run(name: str, batches: int) -> Training:
        values = hparams(trainings, name, hidden=8, noise=2, samples=512)
        return trainings.run(
            "RingGanTrial", name, model_dir=example, ds_config=config, hparams=values, length={"batches": batches}
        )

    whole = trainings.run(
        "RingGanTrial",
        "whole",
        model_dir=example,
        ds_config=config,
        hparams=hparams(trainings, "whole", hidden=8, noise=2, samples=512),
        length={"batches": 6},
        checkpoint_period={"batches": 3},
        validation_period={"batches": 3},
    )
    run("parts", 3)
    parts = run("parts", 6)
    assert parts.succeeded, parts.logs[0]
    for metric in ("d_loss", "g_loss"):
        assert parts.metric(metric) == whole.metric(metric)


def test_a_trial_that_takes_two_batches_a_call_resumes_where_it_was_in_the_data(trainings: Trainings) -> None:
    whole = trainings.run("TakesTwo", "whole", length={"batches": 6}, checkpoint_period={"batches": 3})
    trainings.run("TakesTwo", "parts", length={"batches": 3})
    parts = trainings.run("TakesTwo", "parts", length={"batches": 6})
    assert parts.succeeded, parts.logs[0]
    assert parts.metric("loss") == whole.metric("loss")


def test_a_damaged_checkpoint_is_named_and_the_one_before_is_used(trainings: Trainings) -> None:
    options: dict[str, Any] = {"checkpoint_period": {"batches": 2}, "metric": "none"}
    first = trainings.run("Tiny", length={"batches": 4}, **options)
    assert first.checkpoints == ["batch-00000002", "batch-00000004"]
    engine_file = next((first.root / "checkpoints" / "batch-00000004").rglob("*model_states.pt"))
    engine_file.write_bytes(engine_file.read_bytes()[:-100])
    second = trainings.run("Tiny", length={"batches": 6}, **options)
    assert second.succeeded, second.logs[0]
    assert any("batch-00000004 is damaged" in note for note in second.notes)
    assert [record["batch"] for record in second.of_kind("training")] == [1, 2, 3, 4, 3, 4, 5, 6]


def test_what_a_trial_saves_itself_belongs_to_the_checkpoint(trainings: Trainings) -> None:
    trainings.run("SavesItsOwn", length={"batches": 2})
    training = trainings.run("SavesItsOwn", length={"batches": 4})
    assert "own file kept" in training.said()


@pytest.mark.long
@pytest.mark.parametrize(("stage", "first", "then"), [(1, 2, 1), pytest.param(3, 1, 2, marks=pytest.mark.long)])
def test_a_training_resumes_on_another_number_of_ranks(trainings: Trainings, stage: int, first: int, then: int) -> None:
    def run(name: str, slots: int, batches: int) -> Training:
        config = {**DS_CONFIG, "gradient_accumulation_steps": 4 // slots, "zero_optimization": {"stage": stage}}
        return trainings.run("Exact", name, slots=slots, ds_config=config, length={"batches": batches})

    whole = run("whole", first, 6)
    run("parts", first, 3)
    parts = run("parts", then, 6)
    assert parts.succeeded, "\n".join(parts.logs)
    assert parts.metric("loss") == pytest.approx(whole.metric("loss"), rel=1e-5)


def test_another_batch_than_the_checkpoint_s_is_refused(trainings: Trainings) -> None:
    trainings.run("Tiny", slots=2, length={"batches": 2})
    training = trainings.run("Tiny", slots=1, length={"batches": 4})
    assert not training.succeeded
    assert "was written with a train_batch_size of 8, and this training has 4" in training.logs[0]


# -- pipelines -------------------------------------------------------------------------------------------------------


def test_a_pipeline_takes_a_batch_in_one_call_and_finds_its_data_itself(trainings: Trainings) -> None:
    training = trainings.run("TwoStages", slots=2, ds_config=PIPELINE, length={"epochs": 1})
    assert training.succeeded, training.logs[0] + training.logs[1]
    for rank in range(2):
        said = training.said(rank)
        assert said.count("builds loaders") == 1
        assert [line for line in said if line.startswith("train_batch")] == [
            f"train_batch epoch 0 batch {batch}" for batch in range(8)
        ]
        assert [line for line in said if line.startswith("evaluate_batch")] == ["evaluate_batch 0", "evaluate_batch 1"]


@pytest.mark.long
def test_a_stage_in_the_middle_of_a_pipeline_builds_no_loader_and_reports_nothing(trainings: Trainings) -> None:
    training = trainings.run("TwoStages", slots=3, ds_config=PIPELINE, length={"batches": 2})
    assert training.succeeded, "\n".join(training.logs)
    assert ["builds loaders" in training.said(rank) for rank in range(3)] == [True, False, True]
    assert sorted(training.metric("loss")) == [1, 2]


@pytest.mark.long
def test_a_pipeline_resumes_with_the_same_losses(trainings: Trainings) -> None:
    options: dict[str, Any] = {"slots": 2, "ds_config": PIPELINE}
    whole = trainings.run("TwoStages", "whole", length={"batches": 6}, checkpoint_period={"batches": 3}, **options)
    trainings.run("TwoStages", "parts", length={"batches": 3}, **options)
    parts = trainings.run("TwoStages", "parts", length={"batches": 6}, **options)
    assert parts.metric("loss") == whole.metric("loss"), parts.logs[0]


def test_a_pipeline_refuses_a_batch_of_another_size(trainings: Trainings) -> None:
    values = hparams(trainings, samples=66)
    training = trainings.run("TwoStages", slots=2, ds_config=PIPELINE, hparams=values)
    assert "The last batch of a pipeline's loader has fewer than 4 samples" in training.logs[0]
    assert "Set drop_last=True" in training.logs[0]


def test_a_pipeline_tells_the_validation_data_that_it_leaves_out(trainings: Trainings) -> None:
    values = hparams(trainings, validation_samples=12)
    training = trainings.run("TwoStages", slots=2, ds_config=PIPELINE, hparams=values, length={"batches": 1})
    assert training.notes == [
        "the last 1 validation batches of each replica are left out: a pipeline evaluates 2 at once"
    ]


def test_a_pipeline_needs_enough_validation_data_for_one_call(trainings: Trainings) -> None:
    values = hparams(trainings, validation_samples=4)
    training = trainings.run("TwoStages", slots=2, ds_config=PIPELINE, hparams=values)
    assert "The validation loader holds 1 batches on each replica, and evaluate_batch takes 2" in training.logs[0]


# -- a tuning trial --------------------------------------------------------------------------------------------------


def test_a_training_without_a_length_neither_validates_nor_saves(trainings: Trainings) -> None:
    training = trainings.run("DiesLater", length=None, checkpoints=None, metrics=None, finished=None)
    assert not training.succeeded
    assert not any(line.startswith("evaluate_batch") for line in training.said())
    assert json.loads((training.root / "training.json").read_text())["length"] is None
    assert training.checkpoints == []
