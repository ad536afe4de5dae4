"""The Core API of one rank: in a trial, in a full experiment, and without ZeroTune."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import zerotune as det
from zerotune import core, dsat
from zerotune.trial_lib.messages.folders import StopRequest
from zerotune.trial_lib.messages.orders import SPEC_VARIABLE, TrainingSpec
from zerotune.trial_lib.training.distributed import InvalidTrialError


class Rank:
    """This process as the one rank of a script, in a folder of its own."""

    def __init__(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.root = root
        self._monkeypatch = monkeypatch

    def of(self, **fields: Any) -> None:
        spec = TrainingSpec(trial=None, **{"hparams": {}, "scratch": str(self.root / "scratch"), **fields})
        spec.write(self.root / "training.json")
        self._monkeypatch.setenv(SPEC_VARIABLE, str(self.root / "training.json"))

    def of_full_experiment(self, **fields: Any) -> None:
        names = {"checkpoints": "checkpoints", "metrics": "metrics.jsonl", "finished": "finished.json", "stop": "stop"}
        paths = {field: str(self.root / name) for field, name in names.items()}
        self.of(**{"length": {"batches": 100}, **paths, **fields})

    @property
    def records(self) -> list[dict[str, Any]]:
        path = self.root / "metrics.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    @property
    def finished(self) -> Any:
        path = self.root / "finished.json"
        return json.loads(path.read_text()) if path.exists() else None


@pytest.fixture
def rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Rank:
    monkeypatch.chdir(tmp_path)
    for name in (SPEC_VARIABLE, "RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return Rank(tmp_path, monkeypatch)


def store(context: core.Context, batch: int) -> str:
    with context.checkpoint.store_path({"steps_completed": batch}) as (path, storage_id):
        (path / "weights").write_text(f"of {batch}")
    return storage_id


# -- what a script is told ---------------------------------------------------------------------------------------------


def test_a_script_finds_its_hyperparameters_seed_and_checkpoint(rank: Rank) -> None:
    rank.of_full_experiment(
        hparams={"lr": 0.1, "model": {"layers": 2}},
        seed=7,
        latest_checkpoint="batch-00000010",
        experiment_config={"data": {"folder": "/data"}},
    )
    info = det.get_cluster_info()
    assert info is not None
    assert (info.trial.hparams["lr"], info.trial.hparams.model.layers) == (0.1, 2)
    assert (info.trial.trial_seed, info.latest_checkpoint) == (7, "batch-00000010")
    assert (info.task_type, info.user_data) == ("TRIAL", {"folder": "/data"})


def test_a_script_without_zerotune_is_told_nothing(rank: Rank) -> None:
    assert det.get_cluster_info() is None


# -- length ------------------------------------------------------------------------------------------------------------


def test_a_trial_never_comes_to_the_end_of_its_operation(rank: Rank) -> None:
    rank.of()
    with core.init() as context:
        (op,) = context.searcher.operations()
        assert op.length > 10**9
        assert torch.tensor(op.length, dtype=torch.int32) == op.length
        assert context.searcher.get_configured_units() is None


@pytest.mark.parametrize("unit", ["batches", "records", "epochs"])
def test_a_full_experiment_is_as_long_as_the_experiment_says_in_its_unit(rank: Rank, unit: str) -> None:
    rank.of_full_experiment(length={unit: 12})
    with core.init() as context:
        assert [op.length for op in context.searcher.operations()] == [12]
        assert context.searcher.get_configured_units() == unit


def test_a_length_that_nobody_has_named_is_missed_when_it_is_asked_for(rank: Rank) -> None:
    rank.of_full_experiment(length=None)
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})  # a program with a length of its own needs none
        with pytest.raises(InvalidTrialError, match=r"searcher: \{max_length"):
            next(context.searcher.operations())


def test_an_operation_is_completed_once_and_by_rank_0(rank: Rank) -> None:
    with core.init() as context:
        (op,) = context.searcher.operations()
        assert op.length == 1
        op.report_completed(0.5)
        with pytest.raises(RuntimeError, match="called twice"):
            op.report_completed(0.5)
    with core.init(distributed=core.DistributedContext(rank=1, size=2, local_rank=1, local_size=2)) as context:
        (op,) = context.searcher.operations()
        with pytest.raises(RuntimeError, match=r"Rank 1 has called op\.report_completed: rank 0 alone may"):
            op.report_completed(0.5)


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_metrics_of_a_full_experiment_are_recorded_as_numbers(rank: Rank, capsys: pytest.CaptureFixture[str]) -> None:
    rank.of_full_experiment()
    with core.init() as context:
        values = {"a": 1, "b": np.float32(0.5), "c": torch.tensor([2.0]), "text": "no", "many": [1, 2], "none": None}
        context.train.report_training_metrics(steps_completed=10, metrics=values)
        context.train.report_training_metrics(steps_completed=20, metrics=values)
        context.train.report_validation_metrics(steps_completed=20, metrics={"accuracy": 0.9})
    kinds = [(record["kind"], record.get("batch")) for record in rank.records]
    assert kinds == [("note", None), ("training", 10), ("training", 20), ("validation", 20)]
    assert rank.records[0]["text"] == "metrics that are not one number are left out: many, none, text"
    assert rank.records[1]["metrics"] == {"a": 1.0, "b": 0.5, "c": 2.0}
    assert "batch 20: validation accuracy 0.9" in capsys.readouterr().out


def test_metrics_of_a_trial_are_not_the_users(rank: Rank) -> None:
    rank.of()
    with core.init() as context:
        context.train.report_training_metrics(1, {"loss": 1.0})
        context.train.report_validation_metrics(1, {"validation_loss": 1.0})
        store(context, 1)
    assert {path.name for path in rank.root.iterdir()} == {"training.json", "scratch"}


def test_progress_in_epochs_stands_with_the_metrics(rank: Rank) -> None:
    rank.of_full_experiment(length={"epochs": 3})
    with core.init() as context:
        (op,) = context.searcher.operations()
        op.report_progress(2)
        context.train.report_training_metrics(40, {"loss": 1.0})
    assert (rank.records[0]["batch"], rank.records[0]["epoch"]) == (40, 2)


# -- checkpoints -------------------------------------------------------------------------------------------------------


def test_a_full_experiment_keeps_its_best_and_its_last_two_checkpoints(rank: Rank) -> None:
    rank.of_full_experiment()
    with core.init() as context:
        for batch, loss in ((10, 0.1), (20, 0.5), (30, 0.4), (40, 0.3)):
            context.train.report_validation_metrics(batch, {"validation_loss": loss})
            store(context, batch)
        next(context.searcher.operations()).report_completed(0.3)
    names = sorted(path.name for path in (rank.root / "checkpoints").iterdir())
    assert names == ["batch-00000010", "batch-00000030", "batch-00000040"]
    assert rank.finished == {
        "batches": 40,
        "latest_checkpoint": "batch-00000040",
        "best_checkpoint": "batch-00000010",
        "best_metric": 0.1,
        "metrics": {"validation_loss": 0.3},
    }


def test_a_checkpoint_is_judged_by_a_validation_after_it_as_well(rank: Rank) -> None:
    rank.of_full_experiment(metric="accuracy", smaller_is_better=False)
    with core.init() as context:
        for batch, accuracy in ((10, 0.9), (20, 0.5), (30, 0.4), (40, 0.3)):
            store(context, batch)
            context.train.report_validation_metrics(batch, {"accuracy": accuracy})
    assert (rank.finished["best_checkpoint"], rank.finished["best_metric"]) == ("batch-00000010", 0.9)


def test_a_checkpoint_that_fails_halfway_does_not_exist(rank: Rank) -> None:
    rank.of_full_experiment()

    def train() -> None:
        with core.init() as context:
            store(context, 10)
            with context.checkpoint.store_path({"steps_completed": 20}) as (path, _):
                (path / "half").touch()
                raise OSError("the disk is full")

    with pytest.raises(OSError, match="full"):
        train()
    assert [record["name"] for record in rank.records] == ["batch-00000010"]
    assert rank.finished is None
    assert not (rank.root / "checkpoints" / "batch-00000020").exists()


def test_a_checkpoint_is_restored_copied_and_knows_its_metadata(rank: Rank) -> None:
    rank.of_full_experiment()
    with core.init() as context:
        storage_id = store(context, 10)
        with context.checkpoint.restore_path(storage_id) as path:
            assert (path / "weights").read_text() == "of 10"
        assert context.checkpoint.get_metadata(storage_id) == {"steps_completed": 10}
        context.checkpoint.download(storage_id, "copy", selector=lambda path: path == "weights")
        assert [path.name for path in Path("copy").iterdir()] == ["weights"]
        again = context.checkpoint.upload("copy", {"steps_completed": 20})
        assert again == "batch-00000020"
        with context.checkpoint.restore_path(again) as path:
            assert (path / "weights").read_text() == "of 10"
        with pytest.raises(FileNotFoundError, match="no checkpoint batch-00000077"):
            context.checkpoint.get_metadata("batch-00000077")


def test_a_checkpoint_of_a_full_experiment_has_to_say_how_many_steps_are_done(rank: Rank) -> None:
    rank.of_full_experiment()
    with (
        core.init() as context,
        pytest.raises(ValueError, match=r'metadata=\{"steps_completed": N\}'),
        context.checkpoint.store_path(),
    ):
        pass


def test_without_zerotune_checkpoints_stand_in_a_folder_all_of_them(rank: Rank) -> None:
    with core.init(checkpoint_storage="kept") as context:
        ids = [store(context, batch) for batch in (10, 20, 30, 40)]
        with context.checkpoint.restore_path(ids[0]) as path:
            assert (path / "weights").read_text() == "of 10"
    assert {path.name for path in Path("kept").iterdir()} == set(ids)


# -- stop --------------------------------------------------------------------------------------------------------------


def test_a_full_experiment_is_told_to_stop_and_says_that_it_has(rank: Rank) -> None:
    rank.of_full_experiment()
    request = StopRequest(rank.root / "stop")
    with core.init() as context:
        assert not request.is_heeded
        assert context.preempt.should_preempt() is False
        assert request.is_heeded
        request.make()
        assert context.preempt.should_preempt() is True
        assert not request.was_followed
    assert request.was_followed
    assert rank.finished is None


def test_a_request_that_comes_too_late_changes_nothing(rank: Rank) -> None:
    rank.of_full_experiment()
    request = StopRequest(rank.root / "stop")
    with core.init() as context:
        request.make()
        assert context.preempt.should_preempt()
        next(context.searcher.operations()).report_completed(0.5)
    assert not request.was_followed
    assert rank.finished["metrics"] == {"validation_loss": 0.5}


def test_neither_a_trial_nor_a_run_without_zerotune_is_asked_to_stop(rank: Rank) -> None:
    with core.init() as context:
        assert not context.preempt.should_preempt()
    rank.of()
    with core.init() as context:
        assert not context.preempt.should_preempt()


def test_in_the_mode_of_the_chief_another_rank_may_not_ask(rank: Rank) -> None:
    second = core.DistributedContext(rank=1, size=2, local_rank=1, local_size=2)
    context = core.init(distributed=second, preempt_mode=core.PreemptMode.ChiefOnly)
    with pytest.raises(RuntimeError, match="Rank 1"):
        context.preempt.should_preempt()


# -- the reporting context ---------------------------------------------------------------------------------------------


def test_the_reporting_context_changes_nothing_where_nothing_is_measured(rank: Rank) -> None:
    with core.init() as context, dsat.dsat_reporting_context(context, None, steps_completed=3):
        pass
    with pytest.raises(ZeroDivisionError), dsat.dsat_reporting_context(context, None):
        1 / 0  # noqa: B018
