"""What a study knows of the user's program: what the experiment says of it, and what the profile trial has found."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
    without_tuning_keys,
)
from trial_lib.experiment.read_experiment import Experiment
from trial_lib.records.result import ProgramProfile


@dataclass(frozen=True)
class KnownProgram:
    """The program as far as it is known.

    Attributes:
        base_config: the user's DeepSpeed configuration; where it stands in their code, empty until that has run.
        arg_mappings: by which flag, variable or place in a file the program takes each DeepSpeed key.
        found: what its run has shown; None before it has run.
    """

    base_config: dict[str, Any] = field(default_factory=dict)
    arg_mappings: dict[str, str] = field(default_factory=dict)
    found: ProgramProfile | None = None

    @classmethod
    def of(cls, experiment: Experiment) -> "KnownProgram":
        """Returns what an experiment says of its program."""
        mappings = {str(key): target for key, target in experiment.config.arg_mappings.items()}
        return cls(without_tuning_keys(experiment.ds_config), mappings)

    def learned(self, found: ProgramProfile) -> "KnownProgram":
        """Returns what is known once the program has run: what the experiment says goes before what was found."""
        mappings = {**found.arg_mappings, **self.arg_mappings}
        return KnownProgram(completed_config(self.base_config, found), mappings, found)

    @property
    def is_batch_in_code(self) -> bool:
        """Whether Hugging Face's training arguments stand in the code: its run has shown them, and no flag."""
        return self.found is not None and MICRO_BATCH in self.found.batch and MICRO_BATCH not in self.arg_mappings


def completed_config(base: Mapping[str, Any], program: ProgramProfile) -> dict[str, Any]:
    """Returns the user's DeepSpeed configuration with what it leaves open, as far as that is known.

    Its batch is the one that the engine had when the program ran as it was typed, wherever that comes from, and so are
    the precision and the reduce bucket where it leaves them "auto".

    Args:
        base: what the experiment says; empty where the configuration stands in the code.
        program: what the profile trial found.
    """
    config = dict(base) or overwrite_deepspeed_config(without_tuning_keys(program.ds_config or {}), {})
    config = _settled(config, program.settled)
    if program.typed_batch is None:
        return config
    config[MICRO_BATCH] = program.typed_batch.micro_batch_size
    config[ACCUMULATION] = program.typed_batch.gradient_accumulation_steps
    if TRAIN_BATCH in config:
        config[TRAIN_BATCH] = program.typed_batch.train_batch_size
    return config


def _settled(config: Mapping[str, Any], settled: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration with what an engine had in the place of each "auto" of which that is known."""
    return {
        key: settled[key]
        if value == "auto" and key in settled
        else _settled(value, settled[key])
        if isinstance(value, Mapping) and isinstance(settled.get(key), Mapping)
        else value
        for key, value in config.items()
    }
