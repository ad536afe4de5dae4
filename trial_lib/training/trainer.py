"""Determined's `Trainer`: a script that builds its trial itself, and has the loop of a trial class train it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from trial_lib.training.context import DeepSpeedTrialContext
from trial_lib.training.deepspeed_trial import DeepSpeedTrial
from trial_lib.training.device import join_process_group, rank_device
from trial_lib.training.distributed import DistributedContext
from trial_lib.training.invalid_trial import InvalidTrialError
from trial_lib.training.loop import train_built
from trial_lib.training.saved.random_states import seed_everything
from trial_lib.wire.training_spec import TrainingSpec, UnitLength, training_spec_of_this_rank


@dataclass(frozen=True)
class TrainUnit:
    """A length of training.

    Attributes:
        value: how many.
    """

    value: int
    unit: ClassVar[str] = ""

    @property
    def length(self) -> UnitLength:
        """The length as an experiment's YAML has it.

        Raises:
            InvalidTrialError: the value is no positive whole number.
        """
        if not isinstance(self.value, int) or isinstance(self.value, bool) or self.value < 1:
            raise InvalidTrialError(
                f"{type(self).__name__}({self.value!r}) is no length: give it one whole number from 1 on."
            )
        return {self.unit: self.value}


class Batch(TrainUnit):
    """A length in batches, that is, optimizer steps."""

    unit = "batches"


class Epoch(TrainUnit):
    """A length in passes over the training loader."""

    unit = "epochs"


class Record(TrainUnit):
    """A length in samples."""

    unit = "records"


@contextmanager
def init(
    *,
    hparams: Mapping[str, Any] | None = None,
    exp_conf: Mapping[str, Any] | None = None,
    distributed: DistributedContext | None = None,
    enable_tensorboard_logging: bool = True,
) -> Iterator[DeepSpeedTrialContext]:
    """Yields the context for a trial that the script builds itself; the process group is there by then.

    Args:
        hparams: what `context.get_hparams` returns in a run without ZeroTune, which has the experiment's otherwise.
        exp_conf: what `context.get_experiment_config` returns there.
        distributed: the ranks; by default what the process group says of them.
        enable_tensorboard_logging: has no effect: whoever asks for a TensorBoard writer has one.
    """
    spec = training_spec_of_this_rank()
    if spec is None:
        spec = TrainingSpec(trial=None, hparams=dict(hparams or {}), experiment_config=dict(exp_conf or {}))
    device = rank_device(int(os.environ.get("LOCAL_RANK", "0")))
    if "RANK" in os.environ:
        join_process_group(device)
    seed_everything(spec.seed)
    context = DeepSpeedTrialContext(spec, distributed or DistributedContext.from_torch(), device)
    try:
        yield context
    finally:
        context.close()


class Trainer:
    """Trains a trial that a script has built.

    Args:
        trial: its engines are registered with the context.
        context: what `init` has yielded.
    """

    def __init__(self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext) -> None:
        self._trial = trial
        self._context = context

    def fit(
        self,
        checkpoint_period: TrainUnit | None = None,
        validation_period: TrainUnit | None = None,
        max_length: TrainUnit | None = None,
        reporting_period: TrainUnit | None = None,
        **others: Any,
    ) -> None:
        """Trains until the length is reached; a tuning trial until it is ended from outside.

        What the experiment's YAML says goes before what is passed here. Without ZeroTune nothing is saved.

        Args:
            checkpoint_period: how often to save at least.
            validation_period: how often to validate at least.
            max_length: how long to train.
            reporting_period: batches from one report of the training metrics to the next.
            others: Determined's other arguments, which have no effect: a training resumes from its newest intact
                checkpoint, and its best and last two are kept.

        Raises:
            InvalidTrialError: no engine is registered, or nothing says how long to train.
        """
        spec = _completed(self._context.spec, checkpoint_period, validation_period, max_length, reporting_period)
        train_built(self._trial, self._context, spec)


def _completed(
    spec: TrainingSpec,
    checkpoint_period: TrainUnit | None,
    validation_period: TrainUnit | None,
    max_length: TrainUnit | None,
    reporting_period: TrainUnit | None,
) -> TrainingSpec:
    """Returns a spec with what the script says where it says nothing; that of a trial has no length."""
    if spec.is_trial and training_spec_of_this_rank() is not None:
        return replace(spec, length=None)
    length = spec.length or _length(max_length)
    if length is None:
        raise InvalidTrialError(
            "Nothing says how long to train: give Trainer.fit a max_length, such as Batch(1000), or the experiment's "
            "YAML a searcher.max_length."
        )
    report = spec.report_period
    if reporting_period is not None:
        report = reporting_period.length.get("batches", report)
    return replace(
        spec,
        length=length,
        checkpoint_period=spec.checkpoint_period or _length(checkpoint_period),
        validation_period=spec.validation_period or _length(validation_period),
        report_period=report,
    )


def _length(unit: TrainUnit | None) -> UnitLength | None:
    return None if unit is None else unit.length
