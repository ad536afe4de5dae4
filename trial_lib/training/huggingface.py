"""A callback of the Hugging Face Trainer that reports to ZeroTune. It needs the extra `hf`."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from zerotune.trial_lib.training.core_api import Context, SearcherOperation, get_cluster_info

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError(
        f"zerotune.trial_lib.training.huggingface needs transformers ({error}): "
        "type `pip install '.[hf]'` in ZeroTune's repository."
    ) from error

# Metrics that the Trainer adds at the end of a training, and of an evaluation.
_SUMMARY = "train_runtime"
_OF_THE_CLOCK = ("_runtime", "_per_second", "_compilation_time", "_model_preparation_time")
_EVALUATION, _TEST = "eval_", "test_"


class ZeroTuneCallback(TrainerCallback):  # type: ignore[misc] # transformers has no types here
    """Reports the Trainer's metrics, keeps its checkpoints, and ends it: at the experiment's length, or on a request.

    In a full experiment, metrics reach the record and MLflow. Every checkpoint that the Trainer writes is kept complete
    or absent. The training ends at `searcher.max_length` (in batches or epochs) or at the Trainer's own length,
    whichever comes first. A checkpoint follows a stop. In a trial, and without ZeroTune, the callback changes nothing.

    `DetCallback` is Determined's name of this class.

    Args:
        args: the Trainer's `TrainingArguments`. When a training is resumed, `args.resume_from_checkpoint` is set. Pass
            it to `trainer.train(resume_from_checkpoint=...)`.
        filter_metrics: report only metrics whose names contain one of these, and the experiment's own; None for all.
        user_data: JSON that is kept with every checkpoint, as `my_data.json`.

    Attributes:
        current_op: the operation, for `dsat_reporting_context`; None if the experiment names no length.
    """

    def __init__(
        self,
        core_context: Context,
        args: Any,
        filter_metrics: list[str] | None = None,
        user_data: dict[str, Any] | None = None,
    ) -> None:
        super().__init__()
        self._core = core_context
        self._filter = filter_metrics and [*filter_metrics, core_context.searcher.metric]
        self._user_data = user_data
        self._unit = core_context.searcher.get_configured_units()
        self._stops = False
        self._result: float | None = None
        self.current_op: SearcherOperation | None = None
        if core_context.searcher.has_length:
            self.current_op = next(core_context.searcher.operations())
        self._resume(args)

    def _resume(self, args: Any) -> None:
        # Makes the Trainer resume from the newest kept checkpoint, if there is one.
        info = get_cluster_info()
        if info is None or info.latest_checkpoint is None or getattr(args, "overwrite_output_dir", False):
            return
        with self._core.checkpoint.restore_path(info.latest_checkpoint) as path:
            # Read from the kept copy. The one in the output directory may have been cut short.
            kept = sorted(path.glob("checkpoint-*"))
        if kept:
            args.resume_from_checkpoint = str(kept[-1])

    # -- metrics -------------------------------------------------------------------------------------------------

    def on_log(self, args: Any, state: Any, control: Any, logs: Mapping[str, Any] | None = None, **_: Any) -> None:
        """Reports the metrics that the Trainer logs of its training, and checks whether to stop."""
        if logs and _SUMMARY not in logs and not any(name.startswith((_EVALUATION, _TEST)) for name in logs):
            self._core.train.report_training_metrics(state.global_step, self._selected(logs))

    def on_evaluate(
        self, args: Any, state: Any, control: Any, metrics: Mapping[str, Any] | None = None, **_: Any
    ) -> None:
        if not metrics:
            return
        self._result = metrics.get(self._core.searcher.metric, self._result)
        self._core.train.report_validation_metrics(state.global_step, self._selected(metrics))

    def _selected(self, metrics: Mapping[str, Any]) -> dict[str, Any]:
        return {
            name: value
            for name, value in metrics.items()
            if name != "epoch"
            and not name.endswith(_OF_THE_CLOCK)
            and (self._filter is None or any(part in name for part in self._filter))
        }

    # -- length and stop -----------------------------------------------------------------------------------------

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the training at its length in batches or records, or on a request."""
        if self._unit == "batches":
            self._end_at(state.global_step, args, state, control)
        elif self._unit == "records":
            samples = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
            self._end_at(state.global_step * samples, args, state, control)
        if not self._stops and self._core.preempt.should_preempt():
            self._stops = True
            control.should_save = True
            control.should_training_stop = True

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if self._unit == "epochs":
            self._end_at(round(state.epoch), args, state, control)

    def _end_at(self, done: int, args: Any, state: Any, control: Any) -> None:
        assert self.current_op is not None
        if state.is_world_process_zero:
            self.current_op.report_progress(done)
        if done >= self.current_op.length:
            control.should_log = True
            control.should_evaluate = control.should_evaluate or args.eval_strategy != "no"
            control.should_save = True
            control.should_training_stop = True

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Reports the operation complete, unless the training was stopped by a request."""
        if self.current_op is not None and state.is_world_process_zero and not self._stops:
            self.current_op.report_completed(self._result)

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Keeps a copy of the checkpoint that the Trainer has just written."""
        name = f"checkpoint-{state.global_step}"
        if state.is_world_process_zero and self._user_data is not None:
            (Path(args.output_dir) / name / "my_data.json").write_text(json.dumps(self._user_data), encoding="utf-8")
        self._core.checkpoint.upload(
            args.output_dir,
            metadata={"steps_completed": state.global_step},
            shard=True,
            selector=lambda path: path.startswith(f"{name}/"),
        )


DetCallback = ZeroTuneCallback
