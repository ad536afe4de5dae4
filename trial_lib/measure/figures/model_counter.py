"""Counts the FLOPs and the saved activations of one micro-batch while the model trains."""

import contextlib
from collections.abc import Callable
from typing import Any

from trial_lib.flops.activations import SavedActivations
from trial_lib.flops.compiled_programs import eagerly
from trial_lib.flops.formulas import FlopCounter
from trial_lib.measure.batches.batch_shape import tensors_in
from trial_lib.measure.figures.precision import names


class ModelCounter:
    """Counts the saved activations of the first training micro-batch, and the FLOPs of one on request.

    The two are counted in different micro-batches. Activations are those of the training as it is, and FLOPs only show
    if nothing is compiled.

    Args:
        with_activations: whether to count activations.

    Attributes:
        flops: of this rank's part of the model, forward and backward of that micro-batch.
        uncounted: names of operators that have also run, and have no formula.
        activation_bytes: that a forward pass has saved.
        formats: of the numbers that it has saved, returned or multiplied, such as `bfloat16`.
        counts_activations: whether those of the next micro-batch are counted.
        counts_flops: whether those of the next micro-batch are counted.
    """

    def __init__(self, with_activations: bool) -> None:
        self.flops = 0
        self.uncounted: set[str] = set()
        self.activation_bytes = 0
        self.formats: set[str] = set()
        self.counts_activations = with_activations
        self.counts_flops = False
        self._looks_for_more = False
        self._counter: FlopCounter | None = None
        self._entered = contextlib.ExitStack()

    def count_flops(self) -> None:
        """Counts the FLOPs of the next micro-batch, which runs as its code is written, without compilation."""
        self.counts_flops = True
        self._looks_for_more = False

    def count_activations_again(self) -> None:
        """Counts the activations of each micro-batch from now on, and keeps the largest count."""
        self._looks_for_more = True

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass, and counts it if it is the one to count."""
        if self.counts_flops and self._counter is None:
            # Left at the end of the backward pass, so that a loss outside the engine counts too.
            self._begin()
        if not self.counts_activations and not self._looks_for_more:
            return function(*args, **kwargs)
        with SavedActivations() as saved:
            output = function(*args, **kwargs)
        before = self.activation_bytes
        self.activation_bytes = before + saved.bytes if self.counts_activations else max(before, saved.bytes)
        self.formats |= names({*saved.dtypes, *(tensor.dtype for tensor in tensors_in(output))})
        return output

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass, and ends the count with it."""
        try:
            return function(*args, **kwargs)
        finally:
            self.stop()

    def stop(self) -> None:
        """Ends a count; harmless without one."""
        self.counts_activations = False
        if self._counter is not None:
            self._end()

    def _begin(self) -> None:
        try:
            self._entered.enter_context(eagerly())
        except RuntimeError:
            # The engine is called within a compiled function, in which nothing can be counted.
            self.counts_flops = False
            return
        self._counter = self._entered.enter_context(FlopCounter())

    def _end(self) -> None:
        assert self._counter is not None
        self._entered.close()
        self.flops += self._counter.flops
        self.formats |= names(self._counter.dtypes)
        self.uncounted |= self._counter.uncounted
        self._counter, self.counts_flops = None, False


class StageCounter(ModelCounter):
    """Counts the first forward and the first backward pass of a pipeline stage.

    The schedule runs other micro-batches between the two. The last stage computes the loss in its forward pass.
    """

    def __init__(self, with_activations: bool) -> None:
        super().__init__(with_activations)
        self._counts_backward = False

    def count_flops(self) -> None:
        """Counts the FLOPs of the next forward and of the next backward pass."""
        super().count_flops()
        self._counts_backward = True

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass, and counts it if it is the one to count."""
        try:
            return super().forward(function, *args, **kwargs)
        finally:
            self.stop()

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass, and counts it if it is the one to count."""
        if not self._counts_backward:
            return function(*args, **kwargs)
        self._counts_backward = False
        self._begin()
        return super().backward(function, *args, **kwargs)
