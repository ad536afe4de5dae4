"""Pipeline engines, and the loop's data for them."""

from collections.abc import Callable, Iterator
from typing import Any

Iterators = Callable[[], Iterator[Any] | None]


def is_pipeline(engine: Any) -> bool:
    """Returns whether an engine is DeepSpeed's `PipelineEngine`."""
    from deepspeed.runtime.pipe.engine import PipelineEngine

    return isinstance(engine, PipelineEngine)


def supply_iterators(engine: Any, training: Iterators, validation: Iterators) -> None:
    """Lets `train_batch()` and `eval_batch()` of a pipeline engine be called without an iterator.

    DeepSpeed's `eval_batch` needs one, but Determined's documents call it without.

    Args:
        engine: the pipeline engine, whose two methods are replaced.
        training: returns the loop's training data; None on a stage that reads none.
        validation: the same for the present validation.
    """
    train_batch, eval_batch = engine.train_batch, engine.eval_batch

    def supplied_train_batch(data_iter: Iterator[Any] | None = None) -> Any:
        return train_batch(training() if data_iter is None else data_iter)

    def supplied_eval_batch(data_iter: Iterator[Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return eval_batch(validation() if data_iter is None else data_iter, *args, **kwargs)

    engine.train_batch = supplied_train_batch
    engine.eval_batch = supplied_eval_batch
