"""A trial class on real ranks: the loop calls what it promises, when it promises, and says what is wrong."""

import json

import pytest
from case_fixtures import quick_first
from training_fixtures import DS_CONFIG, EXAMPLES, Trainings, hparams

# -- batches, epochs, lengths ----------------------------------------------------------------------------------------


def test_train_batch_is_called_for_each_micro_batch_and_counts_as_one_batch(trainings: Trainings) -> None:
    training = trainings.run("Tiny", length={"batches": 3})
    assert training.succeeded, training.logs[0]
    calls = [line for line in training.said() if line.startswith("train_batch")]
    assert calls == [f"train_batch epoch 0 batch {batch}" for batch in (0, 0, 1, 1, 2, 2)]
    assert training.finished is not None
    assert training.finished["batches"] == 3


@pytest.mark.parametrize(
    ("length", "batches"),
    quick_first(1, [({"batches": 5}, 5), ({"records": 10}, 3), ({"epochs": 2}, 8)]),
    ids=lambda value: str(value),
)
def test_a_length_counts_batches_records_or_epochs(trainings: Trainings, length: dict[str, int], batches: int) -> None:
    # A batch is 4 samples, an epoch 16.
    training = trainings.run("Tiny", length=length, hparams=hparams(trainings, samples=16))
    assert training.finished is not None, training.logs[0]
    assert training.finished["batches"] == batches


def test_ranks_share_a_batch_of_the_whole_world(trainings: Trainings) -> None:
    training = trainings.run("Tiny", slots=2, length={"records": 16})
    assert training.finished is not None, training.logs[0]
    assert training.finished["batches"] == 2


@pytest.mark.long
def test_epochs_that_end_within_a_batch_are_told(trainings: Trainings) -> None:
    exact = trainings.run("Tiny", "exact", length={"epochs": 1}, hparams=hparams(trainings, "exact", samples=16))
    inexact = trainings.run("Tiny", "inexact", length={"epochs": 2}, hparams=hparams(trainings, "inexact", samples=10))
    assert exact.notes == []
    assert "an epoch has 5 micro-batches on each replica, which is no multiple of the 2 of a batch" in inexact.notes[0]
    assert inexact.finished is not None
    assert inexact.finished["batches"] == 5  # of two micro-batches each: ten, which are two epochs


def test_an_epoch_begins_and_ends_where_the_context_says(trainings: Trainings) -> None:
    training = trainings.run("Watches", length={"epochs": 2}, hparams=hparams(trainings, samples=12))
    told = [line for line in training.said() if line.startswith("batch")]
    first_of_each_batch = told[::2]
    assert first_of_each_batch == [
        "batch 0 starts True ends False",
        "batch 1 starts False ends False",
        "batch 2 starts False ends True",
        "batch 3 starts True ends False",
        "batch 4 starts False ends False",
        "batch 5 starts False ends True",
    ]


@pytest.mark.long
def test_an_experiment_in_epochs_needs_data_of_a_known_length(trainings: Trainings) -> None:
    values = hparams(trainings, iterable=True)
    training = trainings.run("Streams", length={"epochs": 1}, hparams=values)
    assert "Set records_per_epoch in the YAML" in training.logs[0]
    told = trainings.run("Streams", "told", length={"epochs": 1}, records_per_epoch=8, hparams=values)
    assert told.finished is not None, told.logs[0]
    assert told.finished["batches"] == 2


# -- accumulation ----------------------------------------------------------------------------------------------------


def test_without_automatic_accumulation_train_batch_takes_the_whole_batch(trainings: Trainings) -> None:
    training = trainings.run("Accumulates", length={"batches": 2}, hparams=hparams(trainings, takes=2))
    assert training.finished is not None, training.logs[0]
    assert training.finished["batches"] == 2
    assert len([line for line in training.said() if line.startswith("train_batch")]) == 4


def test_without_automatic_accumulation_the_wrong_number_of_micro_batches_is_counted(trainings: Trainings) -> None:
    training = trainings.run("Accumulates", hparams=hparams(trainings, takes=3))
    assert not training.succeeded
    assert "train_batch took 3 micro-batches through the first engine" in training.logs[0]
    assert "gradient_accumulation_steps, 2:" in training.logs[0]


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_the_configuration_is_a_file(trainings: Trainings) -> None:
    assert trainings.run("UsesDsat").succeeded


def test_the_configuration_is_a_file_with_overwrites(trainings: Trainings) -> None:
    values = hparams(trainings, overwrite_deepspeed_args={"gradient_accumulation_steps": 3})
    for trial in ("Tiny", "OverwritesItsConfig"):
        training = trainings.run(trial, length={"batches": 1}, hparams=values)
        assert len([line for line in training.said() if line.startswith("train_batch")]) == 3, training.logs[0]
        (trainings.root / "training" / "checkpoints").rename(trainings.root / f"old-{trial}")
        (trainings.root / "training" / "rank0.log").unlink()


def test_the_configuration_stands_among_the_hyperparameters(trainings: Trainings) -> None:
    inline = {
        "optimizer": {
            "type": "Adam",
            "params": {"betas": [0.8, 0.999], "eps": 1.0e-08, "lr": 0.001, "weight_decay": 3.0e-07, "torch_adam": True},
        },
        "train_batch_size": 16,
        "zero_optimization": {
            "stage": 0,
            "allgather_bucket_size": 50000000,
            "allgather_partitions": True,
            "contiguous_gradients": True,
            "cpu_offload": False,
            "overlap_comm": True,
            "reduce_bucket_size": 50000000,
            "reduce_scatter": True,
        },
        "samples": 64,
    }
    training = trainings.run("PassesItsHparams", hparams=inline)
    assert training.succeeded, training.logs[0]


def test_the_configuration_is_found_in_args_and_deepspeed_builds_the_loader(trainings: Trainings) -> None:
    training = trainings.run("PassesArgs", length={"epochs": 1})
    assert training.finished is not None, training.logs[0]
    assert training.finished["batches"] == 16  # 64 samples


# -- loaders ---------------------------------------------------------------------------------------------------------


def test_config_counts_where_args_name_another_configuration(trainings: Trainings) -> None:
    training = trainings.run("HandsOverTwoConfigs", hparams={"deepspeed_config": {**DS_CONFIG, "train_batch_size": 4}})
    assert training.succeeded, training.logs[0]
    assert "train_batch_size 4 by attribute, 4 by key" in training.said()


@pytest.mark.long
def test_a_loader_of_torch_is_refused_unless_the_checks_are_disabled(trainings: Trainings) -> None:
    refused = trainings.run("TorchLoader")
    assert "build_training_data_loader returned a torch.utils.data.dataloader.DataLoader" in refused.logs[0]
    assert "disable_dataset_reproducibility_checks" in refused.logs[0]
    allowed = trainings.run("TorchLoader", "allowed", hparams=hparams(trainings, "allowed", allows=True))
    assert allowed.succeeded, allowed.logs[0]


# -- the process group -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variables", "before"),
    [
        ({}, True),
        pytest.param({"DET_MANUAL_INIT_DISTRIBUTED": "1"}, False, marks=pytest.mark.long),
        ({"ZEROTUNE_MANUAL_INIT_DISTRIBUTED": "1"}, False),
    ],
    ids=["by the loop", "Determined's variable", "our variable"],
)
def test_the_process_group_is_there_before_the_trial_unless_it_asks_otherwise(
    trainings: Trainings, variables: dict[str, str], before: bool
) -> None:
    training = trainings.run("InitialisesItself", environment=variables)
    assert training.said()[0] == f"initialised before: {before}"
    assert training.succeeded, training.logs[0]


# -- what a trial gets wrong -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("returns", "message"),
    [
        ("none", "train_batch returned None"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (
                ("list", "train_batch returned a list"),
                ("vector", "of shape (3,)"),
                ("tensor", "evaluate_batch returned a tensor"),
            )
        ),
        ("other keys", "evaluate_batch returned other metrics in batch 1"),
        ("too much", "evaluate_batch took more than the validation data hold"),
    ],
)
def test_a_wrong_return_is_named(trainings: Trainings, returns: str, message: str) -> None:
    training = trainings.run("Returns", length={"batches": 1}, hparams=hparams(trainings, returns=returns))
    assert not training.succeeded
    assert "InvalidTrialError: " in training.logs[0]
    assert message in training.logs[0]
    assert training.finished is None


@pytest.mark.parametrize(
    ("misbehaves", "message"),
    quick_first(
        3,
        [
            ("mpu before the engine", "set_mpu was called before an engine is registered"),
            ("mpu twice", "set_mpu was called twice"),
            ("no engine", "has registered no engine"),
            ("wraps the module", "the first of what deepspeed.initialize returns"),
            ("wraps twice", "the same engine twice"),
            ("asks too early", "There is no current batch before the training starts"),
        ],
    ),
)
def test_a_misuse_of_the_context_is_named(trainings: Trainings, misbehaves: str, message: str) -> None:
    training = trainings.run("Misbehaves", hparams=hparams(trainings, misbehaves=misbehaves))
    assert not training.succeeded
    assert message in training.logs[0]


def test_a_class_that_is_no_trial_is_named(trainings: Trainings) -> None:
    assert "no DeepSpeedTrial. Derive the class from zerotune.DeepSpeedTrial" in trainings.run("NoTrial").logs[0]


@pytest.mark.long
def test_model_parallelism_that_the_loop_was_not_told_of_is_named(trainings: Trainings) -> None:
    example = EXAMPLES / "custom_mpu"
    training = trainings.run(
        "TensorParallelTrial",
        slots=2,
        model_dir=example,
        ds_config=json.loads((example / "ds_config.json").read_text()),
        hparams=hparams(trainings, tensor_parallel_size=2, hidden=8, forgets_the_mpu=True),
        model_text=("context.set_mpu(", "if not self.hparams.get('forgets_the_mpu'): context.set_mpu("),
    )
    assert "The first engine has 1 replicas, and the loop counts 2. Call context.set_mpu" in training.logs[0]


@pytest.mark.parametrize("ulysses", [True, False])
def test_ranks_of_one_replica_read_the_same_samples(trainings: Trainings, ulysses: bool) -> None:
    # The engine's own batch counts both ranks where DeepSpeed does not know that they are one replica.
    ds_config = {**DS_CONFIG, "train_batch_size": 4 if ulysses else 8}
    values = hparams(trainings, samples=16, ulysses=ulysses)
    training = trainings.run(
        "one_replica:SharesSamples", slots=2, length={"records": 16}, ds_config=ds_config, hparams=values
    )
    assert training.finished is not None, training.logs[0]
    first, second = ([line for line in training.said(rank) if line.startswith("read")] for rank in range(2))
    assert first == second
    assert len(set(first)) > 1
    # A batch is 2 micro-batches of 2 samples, of one replica.
    assert training.finished["batches"] == 4
    told = "ModelParallelUnit has 1 replicas, and DeepSpeed counts 2"
    assert any(told in note for note in training.notes) == (not ulysses)


# -- callbacks, reducers, stopping, watching -------------------------------------------------------------------------


def test_callbacks_are_called_in_order(trainings: Trainings) -> None:
    training = trainings.run(
        "WithCallbacks",
        length={"epochs": 2},
        validation_period={"epochs": 1},
        report_period=2,
        hparams=hparams(trainings, samples=16, validation_samples=4),
    )
    said = [line for line in training.said() if not line.startswith(("train_batch", "evaluate_batch"))]
    validation = ["validation start", "validation outputs 2", "validation end ['validation_loss']"]
    checkpoint = ["checkpoint save start", "checkpoint write end"]
    loss = {record["batch"]: record["metrics"]["validation_loss"] for record in training.of_kind("validation")}
    # The end is saved in any case, the first epoch's as the best so far.
    assert said == [
        "startup 0 None",
        "training start",
        *["epoch start 0", "workload end ['loss'] 4", "epoch end 0 total 1", "workload end ['loss'] 4"],
        *[*validation, *checkpoint, "checkpoint end batch-00000004"],
        *["epoch start 1", "workload end ['loss'] 4", "epoch end 1 total 2", "workload end ['loss'] 4"],
        *validation,
        *([*checkpoint, "checkpoint end batch-00000008"] if loss[8] < loss[4] else []),
        "training end",
        *([] if loss[8] < loss[4] else [*checkpoint, "checkpoint end batch-00000008"]),
        "shutdown",
    ]


def test_the_state_of_a_callback_is_in_the_checkpoint(trainings: Trainings) -> None:
    values = hparams(trainings, samples=16)
    trainings.run("WithCallbacks", length={"epochs": 1}, hparams=values)
    training = trainings.run("WithCallbacks", length={"epochs": 2}, hparams=values)
    said = training.said()
    assert "startup 4 batch-00000004" in said
    assert "checkpoint load start" in said
    assert "epoch end 1 total 2" in said


def test_reducers_see_the_values_of_all_ranks_in_either_phase(trainings: Trainings) -> None:
    training = trainings.run("Reduces", slots=2, length={"batches": 2}, report_period=2)
    assert training.succeeded, training.logs[0]
    assert training.metric("samples") == {2: 16.0}
    assert training.metric("samples", "validation") == {2: 8.0}
    assert training.metric("largest", "validation") == {2: 11.0}
    assert training.metric("smallest", "validation") == {2: 0.0}
    assert "largest" not in training.of_kind("training")[0]["metrics"]


def test_one_rank_that_asks_to_stop_stops_all_of_them_after_a_report(trainings: Trainings) -> None:
    training = trainings.run("StopsItself", slots=2, length={"batches": 100}, report_period=4)
    assert training.finished is not None, training.logs[0]
    assert training.finished["batches"] == 8
    assert training.checkpoints == ["batch-00000008"]


@pytest.mark.long
def test_the_profiler_and_tensorboard_leave_their_files(trainings: Trainings) -> None:
    training = trainings.run("Watches", length={"batches": 2})
    assert training.succeeded, training.logs[0]
    files = [path.name for path in (training.root / "tensorboard").iterdir()]
    assert any(name.startswith("events.out.tfevents") for name in files)
    assert any(name.endswith(".pt.trace.json") for name in files)
