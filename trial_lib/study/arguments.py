"""The arguments of a study: the experiment, the search, and how the trials run."""

import time
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.result import SEARCH_METRICS, MetricName, TrialResult
from zerotune.trial_lib.search.knobs import ZeroStage
from zerotune.trial_lib.search.methods import METHODS, MethodName

# Arguments for methods with a batch policy. dsat's methods choose batch and memory by themselves.
BATCH_POLICY = ("train_batch_size", "free_batch", "divisible_by", "memory_headroom")
_DEFAULT = METHODS["adaptive"]


class StudyArguments(FrozenRecord):
    """The arguments of a study, as the command line, a deployment or a resumed study's record gives them.

    Attributes:
        config_path: the experiment's YAML. Empty if a command is tuned.
        command: the words of the command to tune, instead of an experiment's YAML.
        arg_mappings: the option or variable of the command that sets each DeepSpeed key.
        vary: the program's switches, by their places in the command, with the values to try. It is for a command. A
            YAML has them in the section `program` of `search_space`.
        model_dir: the model directory. For a command it is the working directory.
        method: search with this method. adaptive races the configurations that fit, and stops when little is left to
            gain. The others are dsat's.
        settings: the settings of the search method, by name. Others keep their defaults.
        max_trials: run at most this many trials, including the profile trial. Your configuration is measured in
            addition.
        max_slots: use at most this many slots for all trials together. Default: all of this host.
        max_micro_batch: try no micro-batch size above this one, in samples. Default: what fits.
        max_minutes: end the study after this many minutes, with the profile trial, builds and waits. The last third is
            left to confirm the winner. Default: no limit.
        train_batch_size: give every configuration this global batch, in samples. Default: that of your configuration.
        free_batch: let the search choose the global batch. This changes the training.
        divisible_by: try only micro-batch sizes that are multiples of this number.
        memory_headroom: leave this share of a slot's memory free.
        max_concurrent_trials: run at most this many trials at once, each on its own slots.
        metric: optimise this metric. Times are per optimizer step.
        zero_stages: search these ZeRO stages. Default: those of the method.
        start_profile_step: measure from this optimizer step on. The first step is 1.
        end_profile_step: measure at least up to this optimizer step. More are measured while their times vary.
        random_seed: draw all random choices of the search from this seed.
        max_search_runner_restarts: restart a search that failed at most this often, from where it stopped.
        beside: measure the same training without DeepSpeed too, by ddp or fsdp2, and compare it with the winner. It is
            for programs in which Accelerate, the Hugging Face Trainer or Lightning turns DeepSpeed on.
        include: add files or folders that the code imports from outside the model directory.
        from_earlier: start from the results of earlier studies of this experiment in this folder. The known winner is
            confirmed. The search runs again only if the code, the versions, the hardware or the throughput has changed.
        plan: begin with this plan, which `zerotune plan` has made, perhaps elsewhere: its folder, or its plan.json. The
            search tries the plan's answer first, and the others in the plan's order.
        run_full_experiment: train at full length with the winning configuration after the search.
        ray_address: spread the trials over the hosts of this Ray cluster, by HOST:PORT or auto. Default: this host
            alone.
        start: choose how ranks start. warm forks them from a primed interpreter, and cold starts fresh ones.
    """

    config_path: Path | None = None
    command: tuple[str, ...] = ()
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    vary: dict[str, Any] = Field(default_factory=dict)
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
    beside: tuple[Literal["ddp", "fsdp2"], ...] = ()
    include: tuple[Path, ...] = ()
    from_earlier: bool = False
    plan: Path | None = None
    run_full_experiment: bool = False
    ray_address: str | None = None
    start: Literal["warm", "cold"] = "warm"

    @model_validator(mode="before")
    @classmethod
    def _without_what_has_gone(cls, given: Any) -> Any:
        # Earlier versions foresaw the program inside a study. Such a study resumes with the arms in its folder.
        return {key: given[key] for key in given if key != "foresee"} if isinstance(given, dict) else given

    @model_validator(mode="before")
    @classmethod
    def _stages_are_the_methods(cls, given: Any) -> Any:
        if isinstance(given, dict) and given.get("zero_stages") is None:
            method = METHODS.get(given.get("method", _DEFAULT.name), _DEFAULT)
            return {**given, "zero_stages": method.stages}
        return given

    @model_validator(mode="after")
    def _fits_together(self) -> "StudyArguments":
        fields = StudyArguments.model_fields
        given = [name for name in BATCH_POLICY if getattr(self, name) != fields[name].default]
        if given and not METHODS[self.method].has_batch_policy:
            able = " and ".join(method.name for method in METHODS.values() if method.has_batch_policy)
            raise ValueError(f"--{given[0].replace('_', '-')} is for the method {able}, not for {self.method}")
        if self.free_batch and self.train_batch_size is not None:
            raise ValueError("--train-batch-size and --free-batch exclude each other")
        if self.from_earlier and not METHODS[self.method].confirms_winner:
            command = self.method.replace("_", "-")
            raise ValueError(f"--from-earlier is for methods that confirm a winner, not for {command}")
        if self.beside and not METHODS[self.method].confirms_winner:
            raise ValueError(f"--beside is for methods that confirm a winner, not for {self.method.replace('_', '-')}")
        if self.plan is not None and not METHODS[self.method].has_catalogue:
            able = " and ".join(method.name for method in METHODS.values() if method.has_catalogue)
            raise ValueError(f"--plan is for the method {able}, not for {self.method}")
        if (self.config_path is None) != bool(self.command):
            raise ValueError("expected either config_path or command")
        if self.vary and not self.command:
            raise ValueError("vary is for a command: a YAML has its switches in search_space, section program")
        if self.end_profile_step < self.start_profile_step:
            raise ValueError(
                f"end_profile_step({self.end_profile_step}) comes before start_profile_step({self.start_profile_step})"
            )
        return self


INSTEAD = (
    "The study goes by throughput, because the model's FLOPs could not be counted for FLOPS_per_gpu. With one model "
    "both metrics rank configurations alike."
)


def metric_with(asked: str, profiled: TrialResult | None) -> str:
    """The metric of a study that was asked for one, given its profile trial if that has ended."""
    profile: ModelProfile | None = None if profiled is None else profiled.profile
    is_without_figure = profile is not None and not profile.flops_per_sample
    return SEARCH_METRICS[asked].instead or asked if is_without_figure else asked


# The time that a study may take (`--max-minutes`)

# The end of a search that has used up its time, as the history has it.
MINUTES_OVER = "its minutes are over"
# A confirmation takes about half the time of the search before it.
_OF_SEARCH = 2 / 3


class StudyTime:
    """Counts the time of a study, from its opening in this process on.

    `minutes` None is no limit. `seconds_before` is the running time of the trials that the study had when it was opened
    again. The last third of the time is left for the confirmation of the search's winner.
    """

    def __init__(self, minutes: float | None, seconds_before: float, confirms: bool = True) -> None:
        self._minutes = minutes
        self._seconds_before = seconds_before
        self._share = _OF_SEARCH if confirms else 1.0
        self._opened = time.monotonic()

    @property
    def is_over(self) -> bool:
        return self._has_taken(1.0)

    @property
    def is_over_for_search(self) -> bool:
        return self._has_taken(self._share)

    @property
    def told(self) -> str:
        """Why a trial is ended when it is over, as a sentence."""
        return f"The {self._minutes:g} minutes of --max-minutes were over while it ran."

    def check(self) -> None:
        if self.is_over:
            raise TimeoutError(self.told)

    def _has_taken(self, share: float) -> bool:
        if self._minutes is None:
            return False
        return time.monotonic() - self._opened + self._seconds_before >= share * 60 * self._minutes
