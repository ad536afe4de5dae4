"""One pass over the validation data."""

from typing import Any

import torch

from trial_lib.training.callbacks import Callbacks
from trial_lib.training.context import DeepSpeedTrialContext
from trial_lib.training.data.loaders import micro_batches, validation_iterator
from trial_lib.training.deepspeed_trial import DeepSpeedTrial
from trial_lib.training.invalid_trial import InvalidTrialError
from trial_lib.training.metrics import MetricAverager, as_metrics


class Validator:
    """Evaluates a trial, as often as it is called.

    Args:
        trial: the trial.
        context: the trial's.
        loader: the validation loader; None on a rank without loaders.
        callbacks: called when a validation begins and ends.

    Attributes:
        left_out: batches of each replica that do not fill a call of `evaluate_batch`.

    Raises:
        InvalidTrialError: the loader has no length, or has too little for one call of `evaluate_batch`.
    """

    def __init__(
        self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, loader: Any, callbacks: Callbacks
    ) -> None:
        self._trial = trial
        self._context = context
        self._loader = loader
        self._callbacks = callbacks
        batches = micro_batches(loader, context)
        if batches is None and not any(context.distributed.allgather(context.mpu.should_build_data_loader)):
            raise InvalidTrialError(
                "No rank builds data loaders. Set should_build_data_loader on at least one rank of each replica."
            )
        if batches is None:
            raise InvalidTrialError("The validation loader has no len(). Return one of a known length.")
        needed = context.num_micro_batches_per_slot if context.use_pipeline_parallel else 1
        if batches < needed:
            raise InvalidTrialError(
                f"The validation loader holds {batches} batches on each replica, and evaluate_batch takes {needed} at "
                "once (gradient_accumulation_steps, with pipeline parallelism). Validate on more data, or in smaller "
                "batches."
            )
        self._calls = batches // needed
        self.left_out = batches % needed

    def validate(self) -> dict[str, float]:
        """Returns the metrics of one validation, the same on every rank.

        Raises:
            InvalidTrialError: `evaluate_batch` returns no metrics or other names than before, or takes more batches
                than there are.
        """
        context, callbacks = self._context, self._callbacks
        context.reducers.reset(for_training=False)
        callbacks.call("on_validation_start")
        callbacks.call("on_validation_epoch_start")
        averager = MetricAverager(strict_keys=True)
        outputs: list[dict[str, Any]] = []
        keeps_outputs = callbacks.is_overridden("on_validation_epoch_end")
        for engine in context.models:
            engine.eval()
        context.validation_iterator = validation_iterator(self._loader, context)
        with torch.no_grad():
            for batch_idx in range(self._calls):
                metrics = self._evaluate(batch_idx)
                averager.add(metrics)
                if keeps_outputs:
                    outputs.append(metrics)
        context.validation_iterator = None
        for engine in context.models:
            engine.train()
        reports = context.mpu.should_report_metrics
        validated = averager.average(context.distributed, reports)
        validated |= context.reducers.reduce(for_training=False, distributed=context.distributed, contributes=reports)
        callbacks.call("on_validation_epoch_end", outputs)
        callbacks.call("on_validation_end", validated)
        return validated

    def _evaluate(self, batch_idx: int) -> dict[str, Any]:
        try:
            returned = self._trial.evaluate_batch(self._context.validation_iterator, batch_idx)
        except StopIteration:
            raise InvalidTrialError(
                f"evaluate_batch took more than the validation data hold: it is called {self._calls} times, for one "
                "batch each (with pipeline parallelism, for gradient_accumulation_steps of them)."
            ) from None
        return as_metrics(returned, "evaluate_batch")
