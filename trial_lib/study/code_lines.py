"""What the answer needs in the user's code: each value with the line at which it stands."""

import json
from collections.abc import Mapping
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    TRAINING_ARGUMENTS,
    difference,
)
from zerotune.trial_lib.inputs.code_places import code_place
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.switches import deepspeed_part
from zerotune.trial_lib.search.knobs import STAGE, get_knob
from zerotune.trial_lib.study.own_command import dotted
from zerotune.trial_lib.study.program import KnownProgram

# The places of the batch in a program of Lightning's. The product follows.
_BY_LIGHTNING = {
    MICRO_BATCH: "batch_size={} of your DataLoader",
    ACCUMULATION: "accumulate_grad_batches={} of Lightning's Trainer",
    TRAIN_BATCH: "",
}


def _at(experiment: Experiment, setting: str) -> str:
    place = code_place(experiment.entrypoint, experiment.model_dir, setting)
    return f" at {place}" if place else ""


def to_set_in_code(
    experiment: Experiment, known: KnownProgram, config: Mapping[str, Any], paths: StudyPaths
) -> list[str]:
    """What you have to change in the configuration in the code; nothing if the command sets it all."""
    base, by_command = deepspeed_part(known.base_config), set(known.arg_mappings)
    if TRAIN_BATCH not in base or {MICRO_BATCH, ACCUMULATION} <= by_command:
        # It follows from the two others, in DeepSpeed or in code that takes both from its command.
        by_command.add(TRAIN_BATCH)
    changes = [(path, value) for path, value in dotted(difference(base, config)) if path not in by_command]
    if not changes:
        return []
    if known.found is not None and known.found.by_lightning:
        return _for_lightning(dict(changes))
    where = f"The DeepSpeed configuration is in the code. Set these values there, from {paths.best_ds_config}:"
    return [where, *(f"  {key}: {json.dumps(value)}{_at(experiment, key)}" for key, value in changes)]


def _for_lightning(changes: Mapping[str, Any]) -> list[str]:
    # Where Lightning takes values of DeepSpeed's configuration. It refuses the accumulation there.
    lines = [f"  {key}: {json.dumps(value)}" for key, value in changes.items() if key not in _BY_LIGHTNING]
    head = ["Pass DeepSpeedStrategy these values, as its own arguments or in its `config`:"] if lines else []
    set_ = [text.format(changes[key]) for key, text in _BY_LIGHTNING.items() if text and key in changes]
    return [*head, *lines, *([f"Set {' and '.join(set_)}."] if set_ else [])]


def arguments_to_set(experiment: Experiment, batch: Mapping[str, int]) -> list[str]:
    """The sentence about a Trainer's arguments in the code; none without a value of the batch to set."""
    names = {TRAINING_ARGUMENTS[key]: value for key, value in batch.items()}
    left = [f"{name}={value}{_at(experiment, name)}" for name, value in names.items()]
    return [f"The training arguments are in the code. Set {', '.join(left)}."] if left else []


def unpartitioned(known: KnownProgram, config: Mapping[str, Any]) -> list[str]:
    """The sentence about a model that the code makes within `deepspeed.zero.Init`; none if that is right."""
    # DeepSpeed's engine takes no partitioned parameters at these stages: a plain run would crash.
    stage = get_knob(config, STAGE, 0)
    if stage == 3 or known.found is None or not known.found.partitions_its_model:
        return []
    return [f"The code makes its model within deepspeed.zero.Init: give it enabled=False at stage {stage}."]
