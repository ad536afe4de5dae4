"""What a study is told: the experiment, the search and how to run it."""

from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

Method = Literal["asha", "binary", "random", "micro_batch"]


class StudyArguments(BaseModel):
    """The arguments of a study, as the command line, a deployment or a resumed study's record gives them.

    Attributes:
        config_path: the experiment's YAML; None where a command was typed in its place.
        command: the words of that command.
        arg_mappings: the flag or the environment variable by which the command's program takes each DeepSpeed key.
        model_dir: the model directory; a command's working directory.
        method: the search.
        settings: of the search, by name; the rest has its default.
        max_trials: trials in all, the profile trial among them; the submitted configuration is measured besides.
        max_slots: slots that all trials together may use; None for all of this host.
        max_micro_batch: the largest micro-batch size (samples) that the search may try; None for what fits.
        max_concurrent_trials: trials that may run at once.
        metric: what is optimised.
        zero_stages: ZeRO stages that the search may use.
        start_profile_step: the first optimizer step that is measured, from 1.
        end_profile_step: the last that is measured at least.
        random_seed: of the search.
        max_search_runner_restarts: how often a flow that failed is started again, where it was.
        include: files and folders that the code imports from outside the model directory.
        run_full_experiment: whether to train at full length with the winner afterwards.
        launcher: `warm` forks ranks from a primed interpreter, `cold` starts fresh ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config_path: Path | None = None
    command: tuple[str, ...] = ()
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    model_dir: Path
    method: Method = "asha"
    settings: dict[str, Any] = Field(default_factory=dict)
    max_trials: PositiveInt = 50
    max_slots: PositiveInt | None = None
    max_micro_batch: PositiveInt | None = None
    max_concurrent_trials: PositiveInt = 16
    metric: str = "FLOPS_per_gpu"
    zero_stages: tuple[int, ...] = (1, 2, 3)
    start_profile_step: PositiveInt = 3
    end_profile_step: PositiveInt = 5
    random_seed: int = 42
    max_search_runner_restarts: NonNegativeInt = 5
    include: tuple[Path, ...] = ()
    run_full_experiment: bool = False
    launcher: Literal["warm", "cold"] = "warm"

    @model_validator(mode="after")
    def _has_an_experiment(self) -> "StudyArguments":
        if (self.config_path is None) != bool(self.command):
            raise ValueError("expected either config_path or command")
        return self

    @model_validator(mode="after")
    def _window_is_not_empty(self) -> "StudyArguments":
        if self.end_profile_step < self.start_profile_step:
            raise ValueError(
                f"end_profile_step({self.end_profile_step}) comes before start_profile_step({self.start_profile_step})"
            )
        return self
