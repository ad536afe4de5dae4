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
from zerotune.trial_lib.inputs.code_places import code_edits
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.switches import deepspeed_part
from zerotune.trial_lib.search.knobs import STAGE, get_knob, leaves
from zerotune.trial_lib.study.program import KnownProgram

# The arguments of the batch in a program of Lightning's: of the DataLoader and of the Trainer. The product follows.
_BY_LIGHTNING = {MICRO_BATCH: "batch_size", ACCUMULATION: "accumulate_grad_batches"}
_BATCH = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)


def _edits(experiment: Experiment, values: Mapping[str, Any], form: str) -> list[str]:
    # The edits as a diff, and the settings that have no value in the code.
    found = code_edits(experiment.entrypoint, experiment.model_dir, values)
    diffs = [line for change in found.changes for line in change.diff(experiment.model_dir).splitlines()]
    left = [
        form.format(name, json.dumps(values[name])) + (f" at {place}" if place else "")
        for name, place in found.left.items()
    ]
    return [f"  {line}" for line in (*diffs, *left)]


def to_set_in_code(
    experiment: Experiment, known: KnownProgram, config: Mapping[str, Any], paths: StudyPaths
) -> list[str]:
    """What you have to change in the configuration in the code; nothing if the command sets it all."""
    base, by_command = deepspeed_part(known.base_config), set(known.arg_mappings)
    if TRAIN_BATCH not in base or {MICRO_BATCH, ACCUMULATION} <= by_command:
        # It follows from the two others, in DeepSpeed or in code that takes both from its command.
        by_command.add(TRAIN_BATCH)
    if known.is_batch_in_code:
        by_command |= set(_BATCH)  # the training arguments have it
    changes = [(path, value) for path, value in leaves(difference(base, config)) if path not in by_command]
    if not changes:
        return []
    if known.found is not None and known.found.by_lightning:
        return _for_lightning(experiment, dict(changes))
    where = f"The DeepSpeed configuration is in the code. Set these values there, from {paths.best_ds_config}:"
    return [where, *_edits(experiment, dict(changes), "{}: {}")]


def _for_lightning(experiment: Experiment, changes: Mapping[str, Any]) -> list[str]:
    # Where Lightning takes values of DeepSpeed's configuration. It refuses the accumulation there.
    batch = {name: changes[key] for key, name in _BY_LIGHTNING.items() if key in changes}
    of_strategy = {key.rpartition(".")[2]: value for key, value in changes.items() if key not in _BATCH}
    return [
        "DeepSpeedStrategy, Lightning's Trainer and your DataLoader have these values in the code. Change them there:",
        *_edits(experiment, {**of_strategy, **batch}, "{}={}"),
    ]


def arguments_to_set(experiment: Experiment, batch: Mapping[str, int]) -> list[str]:
    """What to change in a Trainer's arguments in the code; nothing without a value of the batch to set."""
    values = {TRAINING_ARGUMENTS[key]: value for key, value in batch.items()}
    head = "The training arguments are in the code. Change them there:"
    return [head, *_edits(experiment, values, "{}={}")] if values else []


def unpartitioned(known: KnownProgram, config: Mapping[str, Any]) -> list[str]:
    """The sentence about a model that the code makes within `deepspeed.zero.Init`; none if that is right."""
    # DeepSpeed's engine takes no partitioned parameters at these stages: a plain run would crash.
    stage = get_knob(config, STAGE, 0)
    if stage == 3 or known.found is None or not known.found.partitions_its_model:
        return []
    return [f"The code makes its model within deepspeed.zero.Init: give it enabled=False at stage {stage}."]
