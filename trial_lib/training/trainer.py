"""Determined's `Trainer`: a script builds its trial, and the loop of a trial class trains it."""

import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, ClassVar

from zerotune.trial_lib.messages.orders import TrainingSpec, UnitLength, training_spec_of_this_rank
from zerotune.trial_lib.training.context import DeepSpeedTrialContext
from zerotune.trial_lib.training.data import seed_everything
from zerotune.trial_lib.training.deepspeed_trial import DeepSpeedTrial
from zerotune.trial_lib.training.distributed import (
    DistributedContext,
    InvalidTrialError,
    join_process_group,
    rank_device,
)
from zerotune.trial_lib.training.loop import train_built


@dataclass(frozen=True)
class TrainUnit:
    value: int  # the number of units
    unit: ClassVar[str] = ""

    @property
    def length(self) -> UnitLength:
        """The length as an experiment's YAML has it."""
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
    """Yields the context for a trial that the script builds itself. The process group exists by then.

    Args:
        hparams: the result of `context.get_hparams` without ZeroTune. With ZeroTune it is the experiment's.
        exp_conf: the result of `context.get_experiment_config` without ZeroTune.
        distributed: the ranks. Default: those of the process group.
        enable_tensorboard_logging: has no effect. The context's TensorBoard writer always works.
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
    """Trains a trial that a script has built. Its engines are registered with the context, which is from `init`."""

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
        """Trains until the length is reached. A tuning trial trains until the driver ends it.

        The experiment's YAML goes before these arguments. Without ZeroTune nothing is saved.

        Args:
            checkpoint_period: save at least this often.
            validation_period: validate at least this often.
            max_length: the length of the training.
            reporting_period: batches between two reports of the training metrics.
            others: Determined's other arguments, without an effect. A training resumes from its newest intact
                checkpoint, and keeps its best and last two.

        Raises:
            InvalidTrialError: no engine is registered, or there is no length.
        """
        spec = self._context.spec
        if spec.is_trial and training_spec_of_this_rank() is not None:
            # A trial has no length.
            train_built(self._trial, self._context, replace(spec, length=None))
            return
        length = spec.length or _length(max_length)
        if length is None:
            raise InvalidTrialError(
                "Nothing says how long to train: give Trainer.fit a max_length, such as Batch(1000), or the "
                "experiment's YAML a searcher.max_length."
            )
        report = spec.report_period
        if reporting_period is not None:
            report = reporting_period.length.get("batches", report)
        spec = replace(
            spec,
            length=length,
            checkpoint_period=spec.checkpoint_period or _length(checkpoint_period),
            validation_period=spec.validation_period or _length(validation_period),
            report_period=report,
        )
        train_built(self._trial, self._context, spec)


def _length(unit: TrainUnit | None) -> UnitLength | None:
    return None if unit is None else unit.length
