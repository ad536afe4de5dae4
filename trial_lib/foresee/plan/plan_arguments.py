"""The arguments of a plan: the experiment, and the devices to foresee it on."""

from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, PositiveInt, model_validator

from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.space.knobs import ZERO_STAGES, ZeroStage


class PlanArguments(FrozenRecord):
    """The arguments of a plan, as the command line or a deployment gives them.

    Attributes:
        config_path: the experiment's YAML. Empty if a command is planned.
        command: the words of the command to plan, instead of an experiment's YAML.
        arg_mappings: the option or variable of the command that sets each DeepSpeed key.
        vary: the program's switches, by their places in the command, with the values to foresee. It is for a command. A
            YAML has them in the section `program` of `search_space`.
        model_dir: the model directory. For a command it is the working directory.
        on: plan for these devices, as NAME:NUMBER or NAME:HOSTSxNUMBER, such as h100-80gb:8 or a100-40gb:2x8. Default:
            those of this host.
        price: show the cost of a billion tokens, from the price of one device for one hour: NAME=PRICE, such as
            h100-80gb=2.99.
        devices: read more devices from this YAML file.
        zero_stages: plan these ZeRO stages.
        train_batch_size: give every configuration this global batch, in samples. Default: that of your configuration.
        free_batch: let the plan choose the global batch. This changes the training.
        max_micro_batch: consider no micro-batch size above this one, in samples. Default: what fits.
        memory_headroom: leave this share of a device's memory free.
        deadline: end a foreseen run that has not made its two optimizer steps within this many seconds. They include
            the way to the DeepSpeed engine.
        max_processes: foresee at most this many configurations at once. Default: one for each core of this host.
        from_earlier: foresee the speed of devices by what earlier studies in this folder have measured on them.
        include: add files or folders that the code imports from outside the model directory.
    """

    config_path: Path | None = None
    command: tuple[str, ...] = ()
    arg_mappings: dict[str, str] = Field(default_factory=dict)
    vary: dict[str, Any] = Field(default_factory=dict)
    model_dir: Path
    on: tuple[str, ...] = ()
    price: tuple[str, ...] = ()
    devices: Path | None = None
    zero_stages: tuple[ZeroStage, ...] = ZERO_STAGES  # type: ignore[assignment]
    train_batch_size: PositiveInt | None = None
    free_batch: bool = False
    max_micro_batch: PositiveInt | None = None
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.0
    deadline: Annotated[float, Field(gt=0)] = 300.0
    max_processes: PositiveInt | None = None
    from_earlier: bool = False
    include: tuple[Path, ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _all_stages_if_none_is_named(cls, given: Any) -> Any:
        if isinstance(given, dict) and not given.get("zero_stages"):
            return {name: value for name, value in given.items() if name != "zero_stages"}
        return given

    @model_validator(mode="after")
    def _has_something_to_plan(self) -> "PlanArguments":
        if (self.config_path is None) != bool(self.command):
            raise ValueError("expected either config_path or command")
        if self.vary and not self.command:
            raise ValueError("vary is for a command: a YAML has its switches in search_space, section program")
        if self.free_batch and self.train_batch_size is not None:
            raise ValueError("--train-batch-size and --free-batch exclude each other")
        return self
