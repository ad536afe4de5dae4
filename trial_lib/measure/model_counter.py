"""What a model costs: FLOPs and saved activations of one micro-batch, counted while it trains."""

from collections.abc import Callable
from typing import Any

from trial_lib.measure.activations import SavedActivations
from trial_lib.measure.batch_shape import tensors_in
from trial_lib.measure.flops import FlopCounter
from trial_lib.measure.precision import names


class ModelCounter:
    """Counts FLOPs and saved activations of the first training micro-batch, then stays out of the way.

    Attributes:
        flops: of this rank's part of the model, forward and backward of that micro-batch.
        activation_bytes: that its forward pass kept; counted only where asked for.
        formats: of the numbers that it keeps or returns, such as `bfloat16`; known where activations are counted.
        waits: while True, the micro-batches that come are not the one to count.
    """

    def __init__(self, with_activations: bool) -> None:
        self.flops = 0
        self.activation_bytes = 0
        self.formats: set[str] = set()
        self.waits = False
        self._counts_again = False
        self._with_activations = with_activations
        self._counter: FlopCounter | None = None
        self._done = False

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass, counting if it is the first."""
        if self._counts_again:
            with SavedActivations() as saved:
                output = function(*args, **kwargs)
            self.activation_bytes = max(self.activation_bytes, saved.bytes)
            return output
        if not self.is_next:
            return function(*args, **kwargs)
        if self._counter is None:
            # Entered until the backward pass has ended, so that a loss computed outside the engine counts too.
            self._counter = FlopCounter()
            self._counter.__enter__()  # type: ignore[no-untyped-call]
        if not self._with_activations:
            return function(*args, **kwargs)
        with SavedActivations() as saved:
            output = function(*args, **kwargs)
        self.activation_bytes += saved.bytes
        self.formats |= names({*saved.dtypes, *(tensor.dtype for tensor in tensors_in(output))})
        return output

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass, and ends counting with it."""
        try:
            return function(*args, **kwargs)
        finally:
            self.stop()

    def count_activations_again(self) -> None:
        """Counts the activations of each micro-batch from here on: those of the most demanding one are kept."""
        self._counts_again = True

    @property
    def is_next(self) -> bool:
        """Whether the micro-batch that comes is the one to count."""
        return not (self._done or self.waits)

    def stop(self) -> None:
        """Ends counting; harmless when it has ended, or has to wait."""
        if self.waits:
            return
        self._done = True
        if self._counter is not None:
            self._counter.__exit__(None, None, None)  # type: ignore[no-untyped-call]
            self.flops = self._counter.flops
            self._counter = None


class StageCounter(ModelCounter):
    """Counts the first forward and the first backward pass of a pipeline stage.

    Its schedule runs other micro-batches between the two. The loss is computed inside the last stage's forward pass.
    """

    def __init__(self, with_activations: bool) -> None:
        super().__init__(with_activations)
        self._uncounted = {"forward", "backward"}

    def forward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a forward pass, counting if it is the first."""
        if "forward" not in self._uncounted:
            return function(*args, **kwargs)
        self._uncounted.remove("forward")
        try:
            return super().forward(function, *args, **kwargs)
        finally:
            self.stop()

    def backward(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs a backward pass, counting if it is the first."""
        if "backward" not in self._uncounted:
            return function(*args, **kwargs)
        self._uncounted.remove("backward")
        with FlopCounter() as counter:
            try:
                return function(*args, **kwargs)
            finally:
                self.flops += counter.flops
