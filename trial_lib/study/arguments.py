"""What a study is told: the experiment, the search and how to run it."""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from trial_lib.experiment.knobs import ZeroStage
from trial_lib.experiment.metrics import MetricName
from trial_lib.search.methods import METHODS, MethodName

BATCH_POLICY = ("train_batch_size", "free_batch", "divisible_by", "memory_headroom")
"""What only methods with a batch policy know: dsat's have their own way with the batch and with memory."""

_DEFAULT = METHODS["adaptive"]


class StudyArguments(BaseModel):
    """The arguments of a study, as the command line, a deployment or a resumed study's record gives them.

    Attributes:
        config_path: the experiment's YAML; None where a command stands in its place.
        command: the words of a command to tune, in the place of config_path.
        arg_mappings: the flag or the environment variable by which the command's program takes each DeepSpeed key.
        model_dir: the model directory; a command's working directory.
        method: the search: adaptive races what fits, and stops when little is to gain; the others are dsat's.
        settings: of the search method, by name; the rest has its default.
        max_trials: trials in all, the profile trial among them; the submitted configuration is measured besides.
        max_slots: slots that all trials together may use; None for all of this host.
        max_micro_batch: the largest micro-batch size (samples) that the search may try; None for what fits.
        max_minutes: minutes after which the search starts no further trial; None for no such limit.
        train_batch_size: samples of an optimizer step that the search keeps to; None for the configuration's own.
        free_batch: whether the search may choose the samples of an optimizer step.
        divisible_by: micro-batch sizes that the search tries are multiples of it.
        memory_headroom: share of a slot's memory that the search leaves free.
        max_concurrent_trials: trials that may run at once.
        metric: what is optimised: FLOP/s of a device, samples/s, or seconds of an optimizer step or a part of it.
        zero_stages: ZeRO stages that the search may use; by default all for adaptive, 1 to 3 for the other methods.
        start_profile_step: the first optimizer step that is measured, from 1.
        end_profile_step: the last that is measured at least.
        random_seed: of the search.
        max_search_runner_restarts: how often a flow that failed is started again, where it was.
        include: files and folders that the code imports from outside the model directory.
        from_earlier: whether to start from what earlier studies of the experiment in the same folder found: the known
            winner is confirmed first, and where nothing has changed there is no search.
        run_full_experiment: whether to train at full length with the winner afterwards.
        ray_address: of a Ray cluster, whose hosts the trials are spread over; `auto` for the one that this machine is a
            node of. None for this host alone.
        launcher: `warm` forks ranks from a primed interpreter, `cold` starts fresh ones.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    config_path: Path | None = None
    command: tuple[str, ...] = ()
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    model_dir: Path
    method: MethodName = _DEFAULT.name
    settings: dict[str, Any] = Field(default_factory=dict)
    max_trials: PositiveInt = 50
    max_slots: PositiveInt | None = None
    max_micro_batch: PositiveInt | None = None
    max_minutes: Annotated[float, Field(gt=0)] | None = None
    train_batch_size: PositiveInt | None = None
    free_batch: bool = False
    divisible_by: PositiveInt = 1
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    max_concurrent_trials: PositiveInt = 16
    metric: MetricName = "FLOPS_per_gpu"
    zero_stages: tuple[ZeroStage, ...] = _DEFAULT.stages
    start_profile_step: PositiveInt = 3
    end_profile_step: PositiveInt = 5
    random_seed: int = 42
    max_search_runner_restarts: NonNegativeInt = 5
    include: tuple[Path, ...] = ()
    from_earlier: bool = False
    run_full_experiment: bool = False
    ray_address: str | None = None
    launcher: Literal["warm", "cold"] = "warm"

    @model_validator(mode="before")
    @classmethod
    def _stages_are_the_methods(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("zero_stages") is None:
            method = METHODS.get(given.get("method", _DEFAULT.name), _DEFAULT)
            return {**given, "zero_stages": method.stages}
        return given

    @model_validator(mode="after")
    def _batch_policy_is_some_methods(self) -> "StudyArguments":
        fields = StudyArguments.model_fields
        given = [name for name in BATCH_POLICY if getattr(self, name) != fields[name].default]
        if given and not METHODS[self.method].has_batch_policy:
            able = " and ".join(method.name for method in METHODS.values() if method.has_batch_policy)
            raise ValueError(f"--{given[0].replace('_', '-')} is for the method {able}, not for {self.method}")
        if self.free_batch and self.train_batch_size is not None:
            raise ValueError("--train-batch-size and --free-batch exclude each other")
        return self

    @model_validator(mode="after")
    def _sizes_are_no_answer_to_learn_from(self) -> "StudyArguments":
        if self.from_earlier and not METHODS[self.method].confirms_winner:
            command = self.method.replace("_", "-")
            raise ValueError(f"--from-earlier is for methods that confirm a winner, not for {command}")
        return self

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
