"""Compares the mapped places of a command with the batch that the program's engine had when it ran as typed."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from trial_lib.command.batch_places import BatchPlace, batch_places
from trial_lib.command.mapping_targets import same_place
from trial_lib.deepspeed_config.batch import BatchSizes
from trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, TRAIN_BATCH, setting_at
from trial_lib.deepspeed_config.rules import Setting
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.records.result import Outcome, ProgramProfile, TrialResult
from trial_lib.space.knobs import STAGE


def mapped_places(experiment: Experiment, environment: Mapping[str, str]) -> list[BatchPlace]:
    """Returns the mapped batch keys of an experiment, each with the value in its command.

    Args:
        experiment: what the user submitted.
        environment: the environment of its ranks.
    """
    mappings, folder = experiment.config.arg_mappings, experiment.model_dir
    typed = experiment.entrypoint
    return batch_places(typed.arguments, environment, mappings, folder, typed.wrapper)


def held_against(
    result: TrialResult,
    places: Sequence[BatchPlace],
    arg_mappings: Mapping[Any, str],
    typed_config: Mapping[str, Any] | None = None,
) -> TrialResult:
    """Returns the result of the run as typed, compared with the batch in its command.

    Args:
        result: of that run.
        places: the mapped batch keys of the command.
        arg_mappings: the place that sets each DeepSpeed key. An option among them that was not typed has its default.
        typed_config: the user's DeepSpeed configuration in a file; None or empty if it is in the code.
    """
    if result.program is None:
        return result
    options = result.program.options
    # A default may not be meant, so it contradicts nothing. But it may be the size that the program feeds.
    defaults = [
        BatchPlace(str(key), options[target], f"{target} {options[target]}")
        for key, target in arg_mappings.items()
        if target in options and all(place.key != key for place in places)
    ]
    program = as_mapped(result.program, [*places, *defaults])
    # The code may have changed what it read from the file.
    wrong = wrong_mapping(program, places, program.ds_config or typed_config or {})
    if wrong is not None:
        invalid = {"outcome": Outcome.INVALID, "reason": wrong, "program": None, "micro_batch_arrived": None}
        return result.model_copy(update=invalid)
    return result.model_copy(update={"program": program})


def as_mapped(program: ProgramProfile, places: Sequence[BatchPlace]) -> ProgramProfile:
    """Returns the findings of a run as typed, with the micro-batch that the program really feeds.

    A program may leave its engine at a size that it does not feed, because DeepSpeed does not compare them. If as many
    rows arrive as the mapped micro-batch has, that is the user's micro-batch.

    Args:
        program: the findings of the run.
        places: the mapped batch keys of the command.
    """
    typed = program.typed_batch
    fed = next((place.value for place in places if place.key == MICRO_BATCH), None)
    if typed is None or fed is None or fed == typed.micro_batch_size or program.batch_varies:
        return program
    if program.rows_per_sample * typed.micro_batch_size == fed:
        dimension = program.batch_dimension
    elif program.other_rows_per_sample * typed.micro_batch_size == fed:
        dimension = 1 - program.batch_dimension
    else:
        return program
    replicas = typed.train_batch_size // (typed.micro_batch_size * typed.gradient_accumulation_steps)
    batch = BatchSizes(fed * typed.gradient_accumulation_steps * replicas, fed, typed.gradient_accumulation_steps)
    rows = {"rows_per_sample": 1, "batch_dimension": dimension, "other_rows_per_sample": 0}
    return program.model_copy(update={"typed_batch": batch, **rows})


def wrong_mapping(program: ProgramProfile, places: Sequence[BatchPlace], typed_config: Mapping[str, Any]) -> str | None:
    """Returns how a mapped value differs from that of the program's engine; None if all agree.

    Args:
        program: the findings of a run as typed, from `as_mapped`.
        places: the mapped keys of the command.
        typed_config: the user's DeepSpeed configuration, for the ZeRO stage.
    """
    typed = program.typed_batch
    if typed is None:
        return None
    had = {
        MICRO_BATCH: typed.micro_batch_size * program.divided_among,
        ACCUMULATION: typed.gradient_accumulation_steps,
        TRAIN_BATCH: typed.train_batch_size,
    }
    # A library decides on "auto", and may well read the place.
    if setting_at(typed_config, STAGE) != "auto":
        had[STAGE] = Setting(typed_config, "cpu", None, None).stage
    for place in places:
        if place.value != had.get(place.key, place.value):
            others = [key for key, value in had.items() if value == place.value]
            name = re.split("[ =]", place.shown)[0]
            if any(same_place(name, program.arg_mappings.get(key, "")) for key in others):
                continue  # `KnownProgram.learned` leaves it out.
            remedy = (
                f"If it sets the {others[0]}, map that key to it."
                if others
                else "Map the place that sets it, or nothing."
            )
            return (
                f"{place.key} is mapped to {place.shown}, but as typed the program's engine has {had[place.key]}. "
                f"Trials would differ from your training. {remedy}"
            )
    return None
