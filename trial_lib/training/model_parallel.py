"""The data that a rank reads and the metrics that it reports, if a model spans several devices."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of, sequence_parallel_size
from zerotune.trial_lib.training.distributed import DistributedContext, InvalidTrialError


@dataclass(frozen=True, init=False)
class ModelParallelUnit:
    """The place of one rank in a model-parallel training.

    Args:
        data_parallel_rank: the model replica of this rank, from 0.
        data_parallel_world_size: the number of replicas.
        should_report_metrics: whether the results of this rank's batches count. True on one rank of a replica.
        should_build_data_loader: whether this rank reads data.
        should_build_dataloader: another spelling of `should_build_data_loader`. Give exactly one of the two.

    Raises:
        TypeError: both spellings, or neither.
        InvalidTrialError: the data-parallel rank is not below the world size.
    """

    data_parallel_rank: int
    data_parallel_world_size: int
    should_report_metrics: bool
    should_build_data_loader: bool

    def __init__(
        self,
        data_parallel_rank: int,
        data_parallel_world_size: int,
        should_report_metrics: bool,
        should_build_data_loader: bool | None = None,
        *,
        should_build_dataloader: bool | None = None,
    ) -> None:
        if should_build_data_loader is not None and should_build_dataloader is not None:
            raise TypeError(
                "ModelParallelUnit was given both should_build_data_loader and should_build_dataloader, two spellings "
                "of the same: give one of them."
            )
        builds = should_build_dataloader if should_build_data_loader is None else should_build_data_loader
        if builds is None:
            raise TypeError("ModelParallelUnit was not told if this rank reads data: give should_build_data_loader.")
        if not 0 <= data_parallel_rank < data_parallel_world_size:
            raise InvalidTrialError(
                f"ModelParallelUnit was given data_parallel_rank={data_parallel_rank} of "
                f"data_parallel_world_size={data_parallel_world_size}: ranks count from 0 to the world size - 1."
            )
        object.__setattr__(self, "data_parallel_rank", data_parallel_rank)
        object.__setattr__(self, "data_parallel_world_size", data_parallel_world_size)
        object.__setattr__(self, "should_report_metrics", should_report_metrics)
        object.__setattr__(self, "should_build_data_loader", builds)

    @property
    def should_build_dataloader(self) -> bool:
        return self.should_build_data_loader


def data_parallel_unit(distributed: DistributedContext) -> ModelParallelUnit:
    """The place of a rank that is a replica by itself. It reads data and reports."""
    return ModelParallelUnit(
        data_parallel_rank=distributed.rank,
        data_parallel_world_size=distributed.size,
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def sequence_unit(engine: Any, distributed: DistributedContext) -> ModelParallelUnit:
    """The place of this rank under Ulysses. All ranks of a replica read its samples, and take some tokens each.

    Each has the loss of its own tokens, so all report. Their mean is the replica's.
    """
    size = sequence_parallel_size(engine)
    return ModelParallelUnit(
        data_parallel_rank=distributed.rank // size,
        data_parallel_world_size=replicas_of(engine),
        should_report_metrics=True,
        should_build_data_loader=True,
    )


def pipeline_unit(grid: Any) -> ModelParallelUnit:
    """The place of this rank in a pipeline, by DeepSpeed's `PipelineParallelGrid`.

    The first stage reads the inputs and the last one the labels. Only the last stage has the loss. If layers are sliced
    over several ranks, all slices have it, and the first of them reports it.
    """
    stage = grid.get_pipe_parallel_rank()
    is_last = stage == grid.get_pipe_parallel_world_size() - 1
    return ModelParallelUnit(
        data_parallel_rank=grid.get_data_parallel_rank(),
        data_parallel_world_size=grid.get_data_parallel_world_size(),
        should_report_metrics=is_last and grid.get_slice_parallel_rank() == 0,
        should_build_data_loader=stage == 0 or is_last,
    )


# Pipeline engines, and the loop's data for them.

Iterators = Callable[[], Iterator[Any] | None]


def is_pipeline(engine: Any) -> bool:
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def supply_iterators(engine: Any, training: Iterators, validation: Iterators) -> None:
    """Lets `train_batch()` and `eval_batch()` of a pipeline engine be called without an iterator.

    DeepSpeed's `eval_batch` needs one, but Determined's documents call it without.
    """
    train_batch, eval_batch = engine.train_batch, engine.eval_batch

    def supplied_train_batch(data_iter: Iterator[Any] | None = None) -> Any:
        return train_batch(training() if data_iter is None else data_iter)

    def supplied_eval_batch(data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return eval_batch(validation() if data_iter is None else data_iter, *args, **kwargs)

    engine.train_batch = supplied_train_batch
    engine.eval_batch = supplied_eval_batch
