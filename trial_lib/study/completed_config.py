"""What the profile trial found in the user's code completes what the experiment says of the DeepSpeed configuration."""

from collections.abc import Mapping
from typing import Any

from trial_lib.experiment.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, overwrite_deepspeed_config
from trial_lib.experiment.result import ProgramProfile
from trial_lib.study.answer import without_tuning_keys


def completed_config(base: Mapping[str, Any], program: ProgramProfile) -> dict[str, Any]:
    """Returns the user's DeepSpeed configuration with what it leaves open, as far as that is known.

    Its batch is the one that the engine had when the program ran as it was typed, wherever that comes from.

    Args:
        base: what the experiment says; empty where the configuration stands in the code.
        program: what the profile trial found.
    """
    config = dict(base) or overwrite_deepspeed_config(without_tuning_keys(program.ds_config or {}), {})
    if program.typed_batch is None:
        return config
    config[MICRO_BATCH] = program.typed_batch.micro_batch_size
    config[ACCUMULATION] = program.typed_batch.gradient_accumulation_steps
    if TRAIN_BATCH in config:
        config[TRAIN_BATCH] = program.typed_batch.train_batch_size
    return config
