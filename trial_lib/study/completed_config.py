"""What the profile trial found in the user's code completes what the experiment says of the DeepSpeed configuration."""

from collections.abc import Mapping
from typing import Any

from trial_lib.experiment.overrides import MICRO_BATCH, TRAIN_BATCH, TRAINING_ARGUMENTS, overwrite_deepspeed_config
from trial_lib.experiment.result import ProgramProfile
from trial_lib.study.answer import without_tuning_keys


def completed_config(base: Mapping[str, Any], program: ProgramProfile, typed: Mapping[str, int]) -> dict[str, Any]:
    """Returns the user's DeepSpeed configuration with what it leaves open, as far as that is known.

    Args:
        base: what the experiment says; empty where the configuration stands in the code.
        program: what the profile trial found.
        typed: the batch keys that the command sets.
    """
    config = dict(base) or overwrite_deepspeed_config(without_tuning_keys(program.ds_config or {}), {})
    own = {**program.batch, **typed}
    left_open = {key: value for key, value in own.items() if config.get(key, "auto") == "auto"}
    config |= left_open
    if left_open and config.get(TRAIN_BATCH) == "auto":
        # It follows from the two others.
        del config[TRAIN_BATCH]
    return config


def contradiction(base: Mapping[str, Any], program: ProgramProfile, typed: Mapping[str, int]) -> str | None:
    """Returns what the configuration and Hugging Face's training arguments disagree on; None where they agree.

    Transformers refuses such a program; in trials its arguments follow the candidate, so that it would not be seen.

    Args:
        base: the configuration as the program has it.
        program: what the profile trial found.
        typed: the batch keys that the command sets.
    """
    if MICRO_BATCH not in program.batch:
        return None
    for key, value in {**program.batch, **typed}.items():
        written = base.get(key, "auto")
        if written not in ("auto", value):
            name = TRAINING_ARGUMENTS.get(key, key)
            return (
                f"{key} is {written} in the DeepSpeed configuration, and {name} is {value} in the training arguments: "
                f'make them the same, or write "auto" in the configuration.'
            )
    return None
