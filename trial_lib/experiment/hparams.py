"""The hyperparameters as training code reads them, and where the DeepSpeed configuration stands in them.

It may be a file that `deepspeed_config` names, a mapping there, or DeepSpeed's own keys among the other
hyperparameters; `overwrite_deepspeed_args` is merged into it.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.config import Hyperparameters
from trial_lib.experiment.overrides import CONFIG, DEEPSPEED_KEYS, OVERWRITES, inline_ds_config


def merged_hparams(
    hyperparameters: Hyperparameters, ds_config: Mapping[str, Any], ds_config_path: Path
) -> dict[str, Any]:
    """Returns the hyperparameters with another DeepSpeed configuration in the place of the user's, in its form.

    Args:
        hyperparameters: the experiment's.
        ds_config: the complete configuration to train with: the user's overwrites are in it, so that none is left to
            merge; their key stays, empty, where the file has it, for code that reads it.
        ds_config_path: the file that it stands in.
    """
    hparams = hyperparameters.as_dict()
    if OVERWRITES in hparams:
        hparams[OVERWRITES] = {}
    if inline_ds_config(hparams) is not None:
        rest = {key: value for key, value in hparams.items() if key not in DEEPSPEED_KEYS}
        return {**rest, **ds_config}
    if isinstance(hyperparameters.deepspeed_config, Mapping):
        return {**hparams, CONFIG: dict(ds_config)}
    return {**hparams, CONFIG: str(ds_config_path)}
