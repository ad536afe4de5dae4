"""Tuning trials of trial classes: measured like scripts, warm and cold, without a line of tuning code in the class."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from training_fixtures import EXAMPLES, TRIAL_CLASSES

from zerotune.trial_lib.messages.orders import TrainingSpec
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult


def run(
    trials: Any,
    trial: str,
    starter: str = "warm",
    model_dir: Path = TRIAL_CLASSES,
    hparams: dict[str, Any] | None = None,
    **options: Any,
) -> TrialResult:
    """Runs one trial of `model_def:<trial>` and returns its result."""
    plan = trials.plan("unused", model_dir=model_dir, **options)
    spec = TrainingSpec(
        trial=f"model_def:{trial}",
        hparams={"deepspeed_config": str(plan.paths.ds_config), **(hparams or {})},
        tensorboard=str(plan.paths.tensorboard),
    )
    program = dataclasses.replace(
        plan.program, target={"module": "zerotune.trial_lib.training"}, arguments=[str(plan.paths.training_spec)]
    )
    return trials.start(dataclasses.replace(plan, program=program, training_spec=spec), starter).result()


@pytest.mark.parametrize("starter", ["warm", pytest.param("cold", marks=pytest.mark.long)])
def test_a_trial_class_is_measured(trials: Any, starter: str) -> None:
    result = run(trials, "Tiny", starter, micro_batch=4, accumulation=2, slots=2)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 4
    assert result.metrics["throughput"] > 0


def test_the_profile_of_a_trial_class_knows_its_parameters(trials: Any) -> None:
    result = run(trials, "Tiny", purpose=Purpose.PROFILE, micro_batch=1)
    assert result.profile is not None, result.reason
    assert result.profile.num_params == 4 * 8 + 8 + 8 + 1


def test_the_configuration_among_the_hyperparameters_is_the_trials(trials: Any) -> None:
    inline = {"train_micro_batch_size_per_gpu": 1, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    result = run(trials, "PassesItsHparams", hparams=inline, micro_batch=3)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 3


@pytest.mark.parametrize(("purpose", "micro_batch"), [(Purpose.PROFILE, 1), (Purpose.SEARCH, 3)])
def test_config_counts_beside_args_and_keeps_the_batch_size_that_the_users_own_has(
    trials: Any, purpose: Purpose, micro_batch: int
) -> None:
    own = {"train_batch_size": 8, "optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    hparams = {"deepspeed_config": own}
    # The candidate leaves the batch size to DeepSpeed.
    result = run(trials, "HandsOverTwoConfigs", hparams=hparams, micro_batch=micro_batch, slots=2, purpose=purpose)
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == micro_batch
    said = f"train_batch_size {micro_batch * 2} by attribute, {micro_batch * 2} by key"
    assert said in Path(result.logs[0]).read_text()
    if purpose is Purpose.PROFILE:
        assert result.program is not None
        assert result.program.hands_over_two_configs


@pytest.mark.long
def test_a_pipeline_is_measured(trials: Any) -> None:
    config = json.loads((EXAMPLES / "pipeline_parallel" / "ds_config.json").read_text())
    result = run(
        trials,
        "PipelineTrial",
        model_dir=EXAMPLES / "pipeline_parallel",
        hparams={"pipeline_parallel_size": 2, "layers": 2, "hidden": 32},
        micro_batch=8,
        accumulation=config["gradient_accumulation_steps"],
        slots=2,
        zero={"stage": 1},
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 8


def test_the_first_of_two_engines_is_measured(trials: Any) -> None:
    result = run(
        trials,
        "RingGanTrial",
        model_dir=EXAMPLES / "gan_two_engines",
        hparams={"hidden": 16, "noise": 2, "samples": 1024},
        micro_batch=16,
        slots=2,
        purpose=Purpose.PROFILE,
    )
    assert result.outcome is Outcome.COMPLETED, result.reason
    assert result.micro_batch_arrived == 16
    # The other engine's passes are counted, and do not end the counting: six FLOPs a weight for each of the generator's
    # samples, but for the gradients of its inputs; six for the real and the fake sample in the discriminator, and four
    # where the generator learns through it.
    generator, discriminator = [2 * 16, 16 * 16, 16 * 2], [2 * 16, 16 * 16, 16 * 1]
    expected = 6 * sum(generator) - 2 * generator[0] + (12 + 4) * sum(discriminator) - 4 * discriminator[0]
    assert result.profile is not None
    assert result.profile.flops_per_sample == pytest.approx(expected, rel=0.03)


def test_a_class_that_breaks_the_api_says_so_in_the_trials_reason(trials: Any) -> None:
    result = run(trials, "Misbehaves", hparams={"misbehaves": "no engine"})
    assert result.outcome is Outcome.CRASHED
    assert "has registered no engine" in result.reason
