"""The training loop: batches, reports, validations and checkpoints, each at its time."""

import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of
from zerotune.trial_lib.messages.orders import TrainingSpec
from zerotune.trial_lib.training.checkpoints import (
    Checkpoint,
    CheckpointStore,
    load_rank_state,
    loadable,
    save_rank_state,
    write_end,
)
from zerotune.trial_lib.training.context import DeepSpeedTrialContext, Pace
from zerotune.trial_lib.training.data import DataLoader, capture, custom_iterator, restore, seed_everything
from zerotune.trial_lib.training.deepspeed_trial import Callbacks, DeepSpeedTrial
from zerotune.trial_lib.training.distributed import InvalidTrialError
from zerotune.trial_lib.training.metrics import MetricAverager, Recorder, as_metrics, detached

# The data loaders of a trial, and their data for the loop.


def build_loaders(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, with_validation: bool) -> tuple[Any, Any]:
    if not context.mpu.should_build_data_loader:
        return None, None
    training = _checked(trial.build_training_data_loader, context)
    validation = _checked(trial.build_validation_data_loader, context) if with_validation else None
    for loader in (training, validation):
        if context.needs_even_batches and isinstance(loader, DataLoader):
            _refuse_uneven_batches(loader, context)
    return training, validation


class CountedData:
    """The training data, with the number of micro-batches that this rank has taken. A call may take any number."""

    def __init__(self, batches: Iterator[Any], first: int) -> None:
        self._batches = batches
        self.read = first

    def __iter__(self) -> "CountedData":
        return self

    def __next__(self) -> Any:
        batch = next(self._batches)
        self.read += 1
        return batch


def training_iterator(
    loader: Any, context: DeepSpeedTrialContext, seed: int, first_micro_batch: int
) -> CountedData | None:
    """The endless training data from a micro-batch of this replica on; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        batches = loader.training_iterator(
            seed, mpu.data_parallel_world_size, mpu.data_parallel_rank, first_micro_batch
        )
    else:
        batches = custom_iterator(loader, first_micro_batch)
    return CountedData(batches, first_micro_batch)


def validation_iterator(loader: Any, context: DeepSpeedTrialContext) -> Iterator[Any] | None:
    """One pass over the validation data; None on a rank without loaders."""
    if loader is None:
        return None
    if isinstance(loader, DataLoader):
        mpu = context.mpu
        loader = loader.validation_batches(mpu.data_parallel_world_size, mpu.data_parallel_rank)
    batches: Iterator[Any] = iter(loader)
    return batches


def micro_batches(loader: Any, context: DeepSpeedTrialContext) -> int | None:
    """The micro-batches of one pass on each replica, the same on every rank; None if unknown.

    The trial's own loaders may differ between ranks. The shortest counts, because all must take part in each step.
    """
    own: int | None = None
    if isinstance(loader, DataLoader):
        own = loader.micro_batches_per_epoch(context.mpu.data_parallel_world_size)
    elif hasattr(loader, "__len__"):
        try:
            own = len(loader)
        except TypeError:  # torch's, over an iterable dataset
            own = None
    known = [count for count in context.distributed.allgather(own) if count is not None]
    return min(known, default=None)


def _refuse_uneven_batches(loader: DataLoader, context: DeepSpeedTrialContext) -> None:
    # DeepSpeed (runtime/pipe/engine.py) sends shapes once, and stages receive into buffers of the first batch. Another
    # size would leave the stages waiting for each other.
    size = context.train_micro_batch_size_per_gpu
    if loader.batch_size != size and loader.batch_sampler is None:
        raise InvalidTrialError(
            f"A loader of a pipeline has batches of {loader.batch_size}, and its stages exchange batches of {size}: "
            "use context.train_micro_batch_size_per_gpu in the training and in the validation loader."
        )
    if loader.has_short_batch(context.mpu.data_parallel_world_size):
        raise InvalidTrialError(
            f"The last batch of a pipeline's loader has fewer than {size} samples, and its stages exchange batches of "
            "one size. Set drop_last=True in the training and in the validation loader."
        )


def _of_the_engines_size(loader: Any, context: DeepSpeedTrialContext) -> Any:
    # A loader. One that `deepspeed.initialize` built for another micro-batch size is replaced.
    size = context.train_micro_batch_size_per_gpu
    engine = next((engine for engine in context.models if getattr(engine, "training_dataloader", None) is loader), None)
    if loader is None or engine is None or loader.batch_size == size:
        return loader
    return engine.deepspeed_io(loader.dataset, collate_fn=loader.collate_fn)


def _checked(build: Callable[[], Any], context: DeepSpeedTrialContext) -> Any:
    loader = _of_the_engines_size(build(), context)
    if isinstance(loader, DataLoader) or (not context.checks_loaders and hasattr(loader, "__iter__")):
        return loader
    if loader is None or not hasattr(loader, "__iter__"):
        raise InvalidTrialError(f"{build.__name__} returned {loader!r}, not a loader. Return a zerotune.DataLoader.")
    raise InvalidTrialError(
        f"{build.__name__} returned a {type(loader).__module__}.{type(loader).__name__}, which neither shuffles "
        "reproducibly nor shards as the training does. Return a zerotune.DataLoader, or call "
        "context.disable_dataset_reproducibility_checks() in __init__ and see to both yourself."
    )


# One pass over the validation data.


class Validator:
    """Evaluates a trial, as often as it is called.

    `left_out` are the batches of each replica that do not fill a call of `evaluate_batch`.
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


def train_built(trial: DeepSpeedTrial, context: DeepSpeedTrialContext, spec: TrainingSpec) -> None:
    if not context.models:
        raise InvalidTrialError(
            f"{spec.trial or type(trial).__name__} has registered no engine. Call context.wrap_model_engine(engine) in "
            "its __init__."
        )
    # From here on replicas draw different random numbers, and ranks of one replica the same.
    seed_everything(spec.seed + context.mpu.data_parallel_rank)
    loaders = build_loaders(trial, context, with_validation=spec.length is not None)
    TrainingLoop(trial, context, loaders, spec).run()


class TrainingLoop:
    """Trains a trial to its length, from the newest intact checkpoint on."""

    def __init__(
        self, trial: DeepSpeedTrial, context: DeepSpeedTrialContext, loaders: tuple[Any, Any], spec: TrainingSpec
    ) -> None:
        self._trial = trial
        self._context = context
        self._training_loader, validation_loader = loaders
        self._spec = spec
        self._recorder = Recorder(
            None if spec.metrics is None else Path(spec.metrics), is_writer=context.distributed.rank == 0
        )
        self._callbacks = Callbacks(trial.build_callbacks())
        self._pace = Pace(
            train_batch_size=context.train_micro_batch_size_per_gpu
            * context.num_micro_batches_per_slot
            * context.mpu.data_parallel_world_size,
            accumulation=context.num_micro_batches_per_slot,
            micro_batches_per_epoch=micro_batches(self._training_loader, context),
            records_per_epoch=spec.records_per_epoch,
        )
        context.pace = self._pace
        self._note_on_replicas = _check_replicas(context)
        self._length = None if spec.length is None else self._pace.batches_for(spec.length)
        for period in (spec.validation_period, spec.checkpoint_period):
            self._pace.is_due(period, 1)  # one that cannot be told is an error now, not hours later
        self._validator = None if spec.length is None else Validator(trial, context, validation_loader, self._callbacks)
        self._store = (
            None
            if spec.checkpoints is None
            else CheckpointStore(Path(spec.checkpoints), context.distributed, spec.smaller_is_better)
        )
        if self._store is not None and any(map(_saves_in_the_background, context.models)):
            raise InvalidTrialError(
                'DeepSpeed would still be writing when a checkpoint is sealed: leave "decoupled" out of the checkpoint '
                "writer in its configuration."
            )
        self._calls_per_batch = (
            1
            if context.use_pipeline_parallel or not context.accumulates_automatically
            else context.num_micro_batches_per_slot
        )
        # Since the last report, and since the training began.
        self._averager = MetricAverager()
        self._batch_metrics: list[dict[str, Any]] = []
        self._keeps_batch_metrics = self._callbacks.is_overridden("on_training_workload_end")
        self._batches = 0
        self._first_micro_batch = 0
        self._data: CountedData | None = None
        self._reported, self._validated_at = 0, -1
        self._saved: tuple[int, float | None] = (0, None)
        self._validation: dict[str, float] = {}
        self._lacks_metric = False
        self._reported_at = 0.0

    def run(self) -> None:
        """Trains to the length, or until the trial requests a stop. The last batch is validated and saved."""
        context, callbacks = self._context, self._callbacks
        checkpoint = None if self._store is None else self._store.newest_intact(self._recorder.note)
        callbacks.call(
            "on_trial_startup", 0 if checkpoint is None else checkpoint.batch, checkpoint and checkpoint.path.name
        )
        try:
            states = None if checkpoint is None else self._load(checkpoint)
            context.training_iterator = self._data = training_iterator(
                self._training_loader, context, self._spec.seed, self._first_micro_batch
            )
            # A new training says once what its user may not expect.
            if self._note_on_replicas and self._batches == 0:
                self._recorder.note(self._note_on_replicas)
            if self._spec.length is not None and self._pace.inexact_epochs and self._batches == 0:
                self._recorder.note(self._pace.inexact_epochs)
            if self._validator is not None and self._validator.left_out and self._batches == 0:
                self._recorder.note(
                    f"the last {self._validator.left_out} validation batches of each replica are left out: a pipeline "
                    f"evaluates {self._pace.accumulation} at once"
                )
            for engine in context.models:
                engine.train()
            callbacks.call("on_training_start")
            if states is not None:
                restore(states)  # last: whatever was built until here may have drawn
            self._train()
            callbacks.call("on_training_end")
            self._finish()
        finally:
            context.training_iterator = None  # ends the loader's workers
            callbacks.call("on_trial_shutdown")
            context.close()

    def _train(self) -> None:
        spec, pace = self._spec, self._pace
        self._context.reducers.reset(for_training=True)
        self._reported, self._reported_at = self._batches, time.perf_counter()
        # A tuning trial is only measured, so it ends without these steps.
        profiler = None if self._length is None else self._context.profiler
        if profiler is not None:
            profiler.start()
        try:
            while self._length is None or self._batches < self._length:
                self._train_batch(self._batches)
                self._batches += 1
                if profiler is not None:
                    profiler.step()
                is_last = self._batches == self._length
                validates = self._validator is not None and (
                    is_last or pace.is_due(spec.validation_period, self._batches)
                )
                saves = self._store is not None and pace.is_due(spec.checkpoint_period, self._batches)
                if validates or saves or is_last or self._batches % spec.report_period == 0:
                    stops = self._report()
                    if validates:
                        self._validate()
                    if saves:
                        self._save()
                    if stops:
                        return
        finally:
            if profiler is not None:
                profiler.stop()

    def _train_batch(self, batch_idx: int) -> None:
        context, pace = self._context, self._pace
        context.batch_idx = batch_idx
        epoch_idx = pace.epoch_of(batch_idx)
        if pace.is_epoch_start(batch_idx):
            self._callbacks.call("on_training_epoch_start", epoch_idx)
        counts = not context.accumulates_automatically
        before = _micro_batches_seen(context) if counts else 0
        for _ in range(self._calls_per_batch):
            try:
                returned = self._trial.train_batch(self._data, epoch_idx, batch_idx)
            except StopIteration:
                raise InvalidTrialError(
                    "The training data ended within train_batch. A loader of your own must hold at least one batch."
                ) from None
            metrics = as_metrics(returned, "train_batch")
            self._averager.add(metrics)
            if self._keeps_batch_metrics:
                self._batch_metrics.append(detached(metrics))
        if counts:
            seen = _micro_batches_seen(context) - before
            if seen != pace.accumulation:
                raise InvalidTrialError(
                    f"train_batch took {seen} micro-batches through the first engine, and without automatic "
                    f"accumulation it has to take gradient_accumulation_steps, {pace.accumulation}: forward, backward "
                    "and step for each."
                )
        if pace.is_epoch_end(batch_idx):
            self._callbacks.call("on_training_epoch_end", epoch_idx)

    def _report(self) -> bool:
        # Records the training metrics since the last report. Returns whether any rank has requested a stop.
        context = self._context
        reports = context.mpu.should_report_metrics
        metrics = self._averager.average(context.distributed, reports)
        metrics |= context.reducers.reduce(for_training=True, distributed=context.distributed, contributes=reports)
        context.reducers.reset(for_training=True)
        seconds = time.perf_counter() - self._reported_at
        samples = (self._batches - self._reported) * self._pace.train_batch_size
        self._callbacks.call("on_training_workload_end", metrics, self._batch_metrics)
        self._batch_metrics = []
        self._recorder.training(
            self._batches, self._pace.epoch_of(self._batches - 1), {"throughput": samples / seconds, **metrics}
        )
        self._reported, self._reported_at = self._batches, time.perf_counter()
        return any(context.distributed.allgather(context.get_stop_requested()))

    def _validate(self) -> None:
        # Validates, and saves the best checkpoint so far.
        context = self._context
        assert self._validator is not None
        self._validation = metrics = self._validator.validate()
        context.reducers.reset(for_training=True)
        self._validated_at = self._batches
        self._recorder.validation(self._batches, self._pace.epoch_of(self._batches - 1), metrics)
        if self._spec.metric not in metrics and not self._lacks_metric:
            self._lacks_metric = True
            known = ", ".join(metrics) or "none"
            self._recorder.note(
                f"no checkpoint can be called the best: the validation metrics ({known}) have no {self._spec.metric}, "
                "which searcher.metric names"
            )
        # Rank 0's view of the folder decides. Another's may be stale, and all must save or none.
        is_best = context.distributed.rank == 0 and self._is_best(metrics.get(self._spec.metric))
        if context.distributed.broadcast(is_best):
            self._save()
        self._reported_at = time.perf_counter()

    def _is_best(self, metric: float | None) -> bool:
        if self._store is None or metric is None or not math.isfinite(metric):
            return False
        best = self._store.best()
        if best is None or best.metric is None:
            return True
        return metric < best.metric if self._spec.smaller_is_better else metric > best.metric

    # -- checkpoints ---------------------------------------------------------------------------------------------

    def _save(self) -> None:
        # Writes a checkpoint of this moment, unless an equal one exists.
        metric = self._validation.get(self._spec.metric) if self._validated_at == self._batches else None
        if self._store is None or self._saved == (self._batches, metric):
            return
        state = {"train_batch_size": self._pace.train_batch_size, "accumulation": self._pace.accumulation}
        self._callbacks.call("on_checkpoint_save_start", state)
        checkpoint = self._store.save(self._batches, metric, state, self._write)
        self._saved = self._batches, metric
        self._recorder.checkpoint(self._batches, checkpoint.path.name, metric)
        self._callbacks.call("on_checkpoint_end", str(checkpoint.path))
        self._callbacks.call("on_checkpoint_upload_end", checkpoint.path.name)
        self._reported_at = time.perf_counter()

    def _write(self, folder: Path) -> None:
        self._trial.save(self._context, folder)
        states = {
            "random": capture(),
            "callbacks": self._callbacks.state_dict(),
            "micro_batches_read": 0 if self._data is None else self._data.read,
        }
        save_rank_state(folder, self._context.distributed.rank, states)
        self._callbacks.call("on_checkpoint_write_end", str(folder))

    def _load(self, checkpoint: Checkpoint) -> dict[str, Any] | None:
        # Loads a checkpoint. Returns this rank's random states in it; None for a rank that saved none.
        context = self._context
        rank, size = context.distributed.rank, context.distributed.size
        if checkpoint.state["train_batch_size"] != self._pace.train_batch_size:
            raise InvalidTrialError(
                f"{checkpoint.path} was written with a train_batch_size of {checkpoint.state['train_batch_size']}, and "
                f"this training has {self._pace.train_batch_size}. Resume with the configuration that it began with."
            )
        self._callbacks.call("on_checkpoint_load_start", dict(checkpoint.state))
        with loadable(checkpoint, context.models, context.distributed) as folder:
            self._trial.load(context, folder)
        saved_one = rank < checkpoint.world_size
        # Callbacks have the same state on every rank, so a new rank resumes from the first rank's.
        states = load_rank_state(checkpoint.path, rank if saved_one else 0)
        self._callbacks.load_state_dict(states["callbacks"])
        self._first_micro_batch = states["micro_batches_read"]
        if checkpoint.world_size != size:
            self._first_micro_batch = self._place_on_other_ranks(checkpoint, states["micro_batches_read"])
        self._batches = checkpoint.batch
        self._saved = checkpoint.batch, checkpoint.metric
        random: dict[str, Any] | None = states["random"] if saved_one else None
        return random

    def _place_on_other_ranks(self, checkpoint: Checkpoint, micro_batches_read: int) -> int:
        # The first micro-batch of each replica, with as many samples before it as at the save.
        if micro_batches_read != checkpoint.batch * checkpoint.state["accumulation"]:
            raise InvalidTrialError(
                f"{checkpoint.path} was saved by {checkpoint.world_size} ranks and cannot be loaded by "
                f"{self._context.distributed.size}: train_batch has read {micro_batches_read} micro-batches for "
                f"{checkpoint.batch} batches of {checkpoint.state['accumulation']}, so the place of "
                f"other replicas is unknown. Resume on {checkpoint.world_size} slots."
            )
        return checkpoint.batch * self._pace.accumulation

    def _finish(self) -> None:
        if self._validator is not None and self._validated_at != self._batches:
            self._validate()
        self._save()
        if self._spec.finished is None or self._context.distributed.rank != 0:
            return
        write_end(Path(self._spec.finished), self._store, self._batches, self._validation)


def _saves_in_the_background(engine: Any) -> bool:
    # Whether an engine writes checkpoints while it trains. Older versions of DeepSpeed cannot.
    is_decoupled = getattr(engine.checkpoint_engine, "is_decoupled", None)
    return is_decoupled is not None and bool(is_decoupled())


def _check_replicas(context: DeepSpeedTrialContext) -> str:
    """Refuses a model parallelism unknown to the loop. Ranks of one replica would read different data.

    DeepSpeed need not know the groups of a ModelParallelUnit that the trial has set. Then the return value says what
    counts where. It is empty otherwise.
    """
    ours, engines = context.mpu.data_parallel_world_size, replicas_of(context.models[0])
    if ours != engines and context.has_own_mpu:
        return (
            f"The trial's ModelParallelUnit has {ours} replicas, and DeepSpeed counts {engines}. A batch of the loop "
            f"has the samples of {ours}. DeepSpeed's batch sizes, and samples/s of a search, count {engines}."
        )
    if ours != engines:
        raise InvalidTrialError(
            f"The first engine has {engines} replicas, and the loop counts {ours}. Call context.set_mpu with a "
            "ModelParallelUnit that says which replica each rank belongs to."
        )
    return ""


def _micro_batches_seen(context: DeepSpeedTrialContext) -> int:
    engine = context.models[0]
    if context.use_pipeline_parallel:
        return int(engine.global_steps) * context.num_micro_batches_per_slot
    return int(engine.micro_steps)
