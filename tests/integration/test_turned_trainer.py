"""Switches that ZeroTune turns in a Trainer: its own options do the same, so the answer may name them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from conftest import PROGRAMS
from device_fixtures import TRAINER_FLAGS

from zerotune.trial_lib.deepspeed_config.overrides import config_hash
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.training_command import left_to_write, trainer_options

pytestmark = pytest.mark.alone

ANY = PROGRAMS / "any"
PLACE = "model:activation_checkpointing"


def profiled(trials: Any, turned: dict[str, Any], *options: str) -> TrialResult:
    plan = trials.plan(
        "trainer.py",
        *("--hidden_size", "64", "--layers", "4", "--dropout", "0.2"),
        *TRAINER_FLAGS,
        *options,
        model_dir=ANY,
        config_flag="--deepspeed",
        window=StepWindow(1, 1, max_steps=1),
        purpose=Purpose.PROFILE,
    )
    config = plan.candidate.complete(json.loads((ANY / "ds_auto.json").read_text()))
    plan = replace(plan, ds_config=config, config_hash=config_hash(config), turned=turned)
    result: TrialResult = trials.start(plan).result()
    assert result.outcome is Outcome.COMPLETED, result.reason
    return result


def figures(result: TrialResult) -> tuple[int, list[float]]:
    assert result.profile is not None
    assert result.losses
    assert Path(result.logs[0]).exists()
    return result.profile.activation_mem_per_gpu, result.losses


@pytest.mark.long
@pytest.mark.parametrize("kind", ["full", "every_second"])
def test_the_options_of_the_answer_do_what_the_trials_did(trials: Any, kind: str) -> None:
    own, turned = profiled(trials, {}), profiled(trials, {PLACE: kind})
    assert own.program is not None
    assert own.program.turnable[PLACE][0] == "none"
    # The Trainer itself makes loader and optimizer there, so its options for them have an effect.
    assert {"--optim", "--dataloader_num_workers"} <= set(own.program.trainer_options)
    options = trainer_options({PLACE: kind}, {PLACE: "none"}, own.program.trainer_options)
    assert not left_to_write({PLACE: kind}, {PLACE: "none"}, own.program.trainer_options)
    typed = profiled(trials, {}, *(word for option in options.items() for word in option))
    assert figures(typed) == figures(turned)
    assert figures(turned)[0] < 0.8 * figures(own)[0]
    assert figures(turned)[1] == figures(own)[1]
    assert typed.program is not None
    assert typed.program.turnable[PLACE][0] == kind
    # What the Trainer turns on, a rank turns off.
    without = profiled(trials, {PLACE: "none"}, *(word for option in options.items() for word in option))
    assert figures(without) == figures(own)
