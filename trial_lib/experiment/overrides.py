"""Merging overrides into a DeepSpeed configuration.

A rank imports this module from the user's environment: standard library only.
"""

import copy
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trial_lib.experiment.deepspeed_json import read_deepspeed_json

DeepSpeedConfig = dict[str, Any]

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN_BATCH = "train_batch_size"


def overwrite_deepspeed_config(base: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> DeepSpeedConfig:
    """Returns a new DeepSpeed configuration: `base` with `overrides` merged in, section by section.

    The predecessor's `determined.pytorch.dsat.overwrite_deepspeed_config`. A mapping is merged into a mapping, anything
    else replaces what stood there; neither argument is changed. Where the overrides set the micro-batch size and the
    accumulation without `train_batch_size`, the base's `train_batch_size` is dropped: DeepSpeed derives it.

    Args:
        base: a DeepSpeed configuration, or the path of its JSON file.
        overrides: the part to set, in the configuration's own shape (`overwrite_deepspeed_args`).

    Raises:
        InputError: the file is missing, is not JSON, or has a key twice.
    """
    config = copy.deepcopy(dict(base)) if isinstance(base, Mapping) else read_deepspeed_json(Path(base))
    _merge(config, overrides)
    if MICRO_BATCH in overrides and ACCUMULATION in overrides and TRAIN_BATCH not in overrides:
        config.pop(TRAIN_BATCH, None)
    return config


def _merge(target: DeepSpeedConfig, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = copy.deepcopy(value)


def get_ds_config_from_hparams(hparams: Mapping[str, Any], base_dir: str | Path = ".") -> DeepSpeedConfig:
    """Returns the DeepSpeed configuration that an experiment's hyperparameters describe.

    The predecessor's `dsat.get_ds_config_from_hparams`.

    Args:
        hparams: the experiment's `hyperparameters`, with `deepspeed_config` (a path below `base_dir`, or the
            configuration itself) and, optionally, `overwrite_deepspeed_args`.
        base_dir: the model directory that a relative path starts from.

    Raises:
        KeyError: `deepspeed_config` is absent.
        InputError: the file is missing, is not JSON, or has a key twice.
    """
    base = hparams["deepspeed_config"]
    if not isinstance(base, Mapping):
        base = Path(base_dir) / base
    return overwrite_deepspeed_config(base, hparams.get("overwrite_deepspeed_args") or {})


def config_hash(config: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits that name a complete DeepSpeed configuration, whatever the order of its keys."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]
