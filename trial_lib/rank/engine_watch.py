"""Watches a DeepSpeed engine: its batches, the times of its parts, and the ends of its optimizer steps."""

import contextlib
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import torch

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    replicas_of,
    sequence_parallel_size,
)
from zerotune.trial_lib.messages.measurement import Arrival
from zerotune.trial_lib.rank.device import Device
from zerotune.trial_lib.rank.flops import DirectCalls, ModelCounter, StageCounter
from zerotune.trial_lib.rank.loader_batches import (
    batch_sizes,
    elements_in,
    shapes_of,
    tensors_in,
    tokens_attended,
    tokens_in,
    tokens_per_row,
)
from zerotune.trial_lib.rank.row_survey import RowSurvey
from zerotune.trial_lib.rank.tensor_parallel import digest, tensor_parallel_size

# Seconds of an optimizer step: by the device's clock and of processor time.
#
# A training runs ahead of its device. While the device works on a step, the program loads the next batch and queues
# more work. So nothing may wait for the device between two steps. Times are marked in the device's own queue. They are
# read later, when the ranks decide something and the device is idle anyway.

PARTS = ("forward", "backward", "step")


@dataclass(frozen=True)
class _Moment:
    instant: Any  # by the device's clock
    cpu_s: float


@dataclass(frozen=True)
class StepTime:
    """The time of an optimizer step, which can be read when the device has done it."""

    device: Device
    span: tuple[_Moment, _Moment]
    parts: dict[str, list[tuple[Any, Any]]]

    def seconds(self) -> dict[str, float]:
        """By the device's clock (`latency`), of processor time (`cpu`), and of each part."""
        between, (start, end) = self.device.seconds_between, self.span
        parts = {part: sum(between(*call) for call in calls) for part, calls in self.parts.items()}
        return {"latency": between(start.instant, end.instant), "cpu": end.cpu_s - start.cpu_s, **parts}


class StepClock:
    """Runs from one `mark` to the next `step_ended`."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self.mark()

    def mark(self) -> None:
        self._started = self._now()

    def step_ended(self, parts: dict[str, list[tuple[Any, Any]]]) -> StepTime:
        return StepTime(self._device, (self._started, self._now()), parts)

    def _now(self) -> _Moment:
        return _Moment(self._device.instant(), time.process_time())


class PartTimer:
    """Records when each part of an optimizer step begins and ends."""

    def __init__(self, device: Device) -> None:
        # A context that names a call of a part in a trace; None if nothing is traced
        self.scope: Callable[[str], AbstractContextManager[Any]] | None = None
        self._device = device
        self._calls: dict[str, list[tuple[Any, Any]]] = {part: [] for part in PARTS}

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._device.is_recording():
                return function(*args, **kwargs)
            start = self._device.instant()
            try:
                with contextlib.nullcontext() if self.scope is None else self.scope(part):
                    return function(*args, **kwargs)
            finally:
                self._calls[part].append((start, self._device.instant()))

        return call

    def take(self) -> dict[str, list[tuple[Any, Any]]]:
        calls, self._calls = self._calls, {part: [] for part in PARTS}
        return calls


class BackwardPasses:
    """Counts backward passes that end an accumulation, from one step to the next, and calls `repeated` at the second.

    The engine finds the end by its own count, or by `set_gradient_accumulation_boundary`, which Accelerate calls.
    """

    def __init__(self, engine: Any, repeated: Callable[[], None]) -> None:
        self._engine = engine
        self._repeated = repeated
        self._since_step = 0

    def begin(self) -> None:
        is_inside_no_sync = getattr(self._engine, "inside_no_sync_ctxt", False)
        if is_inside_no_sync or not self._engine.is_gradient_accumulation_boundary():
            return
        self._since_step += 1
        if self._since_step == 2:
            self._repeated()

    def end(self) -> None:
        self._since_step = 0


# Sizes of the batches that have arrived, by the dimension that may have the rows.
_ROWS = ("rows_in_first", "rows_in_second")

# Further micro-batches add nothing about how sizes vary.
_MOST_SIZES = 64


class StepObserver(Protocol):
    """The receiver of a watch's events."""

    def optimizer_step_begins(self) -> None: ...  # at the end of an accumulation
    # Once per step; not applied if loss scaling has skipped it
    def optimizer_step_ended(self, applied: bool) -> None: ...
    # Of a training micro-batch; `tokens` if it shows them
    def first_batch_arrived(self, sizes: tuple[int, ...], tokens: int | None) -> None: ...
    def other_engine_stepped(self, engine: Any) -> None: ...  # an engine that was left out


def _nothing_arrived() -> dict[str, Any]:
    return dict.fromkeys((*_ROWS, "micro_batches", "tokens", "elements"), 0.0)


class EngineWatch:
    """Watches a `DeepSpeedEngine` by replacing `forward`, `backward` and `step` of this one engine.

    A backward pass is `engine.backward(loss)`, or the loss's own `backward()` after a forward pass of this engine. With
    fp16 it is `engine.scale(loss).backward()`, whose loss is the tensor before scaling: the scaled one may be inf.
    """

    _counter: type[ModelCounter] = ModelCounter

    def __init__(
        self,
        engine: Any,
        device: Device,
        asked_micro_batch: int,
        observer: StepObserver,
        with_activations: bool,
        arrival: Arrival,  # how samples show in the batches that arrive
    ) -> None:
        self.engine = engine
        self.device = device
        self.clock = StepClock(device)
        self.asked = asked_micro_batch  # the micro-batch size that the engine is set to
        self.arrival = arrival
        self.sizes: list[tuple[int, ...]] = []  # of the first training micro-batches, as `batch_sizes` returns them
        self.parts = PartTimer(device)
        # Activations of the first micro-batch, and the FLOPs of one on request
        self.model = self._counter(with_activations)
        self._arrived = _nothing_arrived()
        self.micro_batches = 0  # trained on so far
        self._kept: tuple[int, ...] = ()
        self._counted: tuple[int, ...] = ()
        self.counted_elements = 0  # numbers in the micro-batch whose FLOPs `model` has counted
        self.first_micro_batch: int | None = None  # samples in the first micro-batch; None before it
        self.first_digest: float | None = None  # of the values in it; None without tensor parallelism
        self.shortest_sequence: int | None = None  # fewest tokens in a row; None if no inputs show tokens
        self.longest_sequence: int | None = None
        self.row_survey: RowSurvey | None = None  # while it looks at a micro-batch
        self.loss: torch.Tensor | None = None  # the last one passed to `backward`, unscaled, on its device
        self.micro_batch_losses: list[torch.Tensor] = []  # since `take_loss`
        self.has_trained = False
        self.repeats_backward = False  # more than once for one step, of this engine or another
        self._observer = observer
        # True between a forward pass and its backward pass.
        self._is_open = False
        # True during another engine's backward pass, and just before it.
        self._is_elsewhere = self._is_scaled_elsewhere = False
        # Losses that the code has scaled since the last backward pass.
        self._unscaled: list[torch.Tensor] = []
        # `from_pretrained` returns a model in eval mode, and many programs train it so.
        self._trains_in_eval_mode = not engine.module.training
        self._in_eval_mode: list[torch.Tensor] | None = None
        self._install()

    def _install(self) -> None:
        engine = self.engine
        forward = self.parts.timed("forward", engine.forward)
        backward = self.parts.timed("backward", engine.backward)
        step = self.parts.timed("step", engine.step)
        passes = BackwardPasses(engine, self._backward_repeated)

        def called_directly(inputs: Any) -> None:
            # Records a forward pass that bypasses the engine, as in many a GAN. Its batch counts as well.
            if self._trains_now() and not self._is_open:
                self.has_trained = self._is_open = True
                self.batch_arrived(inputs)

        # A call of the engine itself is counted elsewhere.
        direct_calls = DirectCalls(engine.module, called_directly)

        # The engine's own methods

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            direct_calls.remove()
            if not self._trains_now():
                self._in_eval_mode = shapes_of([args, kwargs]) if torch.is_grad_enabled() else None
                return engine_forward(*args, **kwargs)
            self._in_eval_mode = None
            self.has_trained = True
            if not self._is_open:
                # A second forward pass before the backward pass is another view of the same samples.
                self.batch_arrived([args, kwargs])
            self._is_open = True
            counted = partial(self.model.forward, forward)
            if self.row_survey is None:
                return counted(*args, **kwargs)
            return self.row_survey.forward(engine_forward, counted, args, kwargs)

        def watched_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._take_up_eval_mode()
            self._is_open = False
            self._survey_loss(loss)
            passes.begin()
            left = self.model.backward(backward, loss, *args, **kwargs)
            # DeepSpeed divides the loss by the accumulation, unless the caller has done so. It returns the result.
            is_left = isinstance(left, torch.Tensor)
            self.loss_arrived(left.detach() * engine.gradient_accumulation_steps() if is_left else loss)
            return left

        def watched_scale(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self._survey_loss(loss)
            self._unscaled.append(loss.detach())
            return scale(loss, *args, **kwargs)

        def watched_tensor_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            # `engine.backward` comes here as well, and so do backward passes that have nothing to do with this engine.
            is_elsewhere, self._is_scaled_elsewhere = self._is_elsewhere or self._is_scaled_elsewhere, False
            if not self._is_open or is_elsewhere:
                return tensor_backward(loss, *args, **kwargs)
            self._is_open = False
            self._survey_loss(loss)
            passes.begin()
            for each in self._unscaled or [loss]:
                self.loss_arrived(each)
            self._unscaled = []
            return self.model.backward(timed_tensor_backward, loss, *args, **kwargs)

        def watched_step(*args: Any, **kwargs: Any) -> Any:
            self._is_open = False
            self._unscaled = []
            passes.end()
            at_boundary = engine.is_gradient_accumulation_boundary()
            if at_boundary:
                self._observer.optimizer_step_begins()
            result = step(*args, **kwargs)
            if at_boundary:
                self.model.stop()
                self._observer.optimizer_step_ended(bool(engine.was_step_applied()))
            return result

        # The replacements are put in place.
        engine_forward = engine.forward
        tensor_backward: Any = torch.Tensor.backward
        timed_tensor_backward = self.parts.timed("backward", tensor_backward)
        # torch keeps lists of its functions for the whole process, and Dynamo asks for them. So the function that is in
        # their place reaches the engine only until `end`.
        self._in_turn = in_turn = [tensor_backward, watched_tensor_backward]

        def latest_backward(loss: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return in_turn[-1](loss, *args, **kwargs)

        torch.Tensor.backward = latest_backward  # type: ignore[method-assign, assignment]
        engine.forward = watched_forward
        engine.backward = watched_backward
        engine.step = watched_step
        # An older DeepSpeed does not have it.
        scale: Any = getattr(engine, "scale", None)
        if scale is not None:
            engine.scale = watched_scale
        self._tensor_backward = tensor_backward
        self._direct_calls = direct_calls

    def _survey_loss(self, loss: Any) -> None:
        if self.row_survey is not None:
            self.row_survey.backward(loss)

    def _trains_now(self) -> bool:
        # Whether a forward pass that begins is a training pass. `engine.eval()` sets only the module.
        if not torch.is_grad_enabled():
            return False
        if self.engine.module.training:
            self._trains_in_eval_mode = False
        return self.engine.module.training or self._trains_in_eval_mode

    def _take_up_eval_mode(self) -> None:
        # After all, the forward pass in eval mode was of the training: a backward pass follows it.
        if not self._is_open and self._in_eval_mode is not None:
            self.has_trained = self._trains_in_eval_mode = True
            self.batch_arrived(self._in_eval_mode)
        self._in_eval_mode = None

    def _backward_repeated(self) -> None:
        self.repeats_backward = True

    def start_over(self, asked_micro_batch: int, observer: StepObserver) -> None:
        """Watches the same engine for another observer, as if it had no batch yet."""
        self.asked, self._observer = asked_micro_batch, observer
        self.model = self._counter(with_activations=False)
        self.parts.take()
        self._arrived, self.sizes = _nothing_arrived(), []
        self.micro_batches = 0
        self.first_micro_batch = self.shortest_sequence = self.longest_sequence = self.loss = None
        self.micro_batch_losses, self._unscaled = [], []
        self._is_open, self.row_survey = False, None

    def end(self) -> None:
        torch.Tensor.backward = self._tensor_backward  # type: ignore[method-assign]
        del self._in_turn[1:]
        self._direct_calls.remove()
        for name in ("forward", "backward", "step", "scale"):
            vars(self.engine).pop(name, None)

    def leave_out(self, engine: Any) -> None:
        """Stops backward passes of another engine, which in a GAN come between this one's, from counting here."""
        backward, step = engine.backward, engine.step
        passes = BackwardPasses(engine, self._backward_repeated)

        def backward_elsewhere(*args: Any, **kwargs: Any) -> Any:
            self._is_elsewhere = True
            passes.begin()
            try:
                return backward(*args, **kwargs)
            finally:
                self._is_elsewhere = False

        def step_elsewhere(*args: Any, **kwargs: Any) -> Any:
            passes.end()
            at_boundary = engine.is_gradient_accumulation_boundary()
            result = step(*args, **kwargs)
            if at_boundary:
                self._observer.other_engine_stepped(engine)
            return result

        def scale_elsewhere(*args: Any, **kwargs: Any) -> Any:
            self._is_scaled_elsewhere = True
            return scale(*args, **kwargs)

        engine.backward = backward_elsewhere
        engine.step = step_elsewhere
        scale: Any = getattr(engine, "scale", None)
        if scale is not None:
            engine.scale = scale_elsewhere

    def batch_arrived(self, inputs: Any) -> None:
        self.micro_batches += 1
        sizes = batch_sizes(inputs)
        if not sizes:
            return
        # Ulysses gives a rank its part of each sample.
        ranks = sequence_parallel_size(self.engine)
        tokens = (tokens_in(inputs) or 0) * ranks or None
        if not self.sizes:
            self.first_digest = digest(inputs) if tensor_parallel_size(self.engine) > 1 else None
            self._observer.first_batch_arrived(sizes, tokens)
            self.first_micro_batch = round(self.arrival.samples(self.rows_in(sizes), self.asked))
        if self.model.counts_activations:
            self._kept = sizes
        if self.model.counts_flops:
            self._counted, self.counted_elements = sizes, elements_in(inputs)
        if len(self.sizes) < _MOST_SIZES:
            self.sizes.append(sizes)
        self._arrived["micro_batches"] += 1
        self._arrived["elements"] += elements_in(inputs)
        attended = tokens_attended(inputs)
        # A sum on the device stays there, because reading it would wait for the device.
        self._arrived["tokens"] += (tokens or 0) if attended is None else attended * ranks
        for name, size in zip(_ROWS, sizes, strict=False):
            self._arrived[name] += size
        # Batches of `(sequence, batch)` are never stretched.
        length = None if self.arrival.dimension else tokens_per_row(inputs)
        if length is not None:
            length *= ranks
            self.shortest_sequence = min(length, self.shortest_sequence or length)
            self.longest_sequence = max(length, self.longest_sequence or length)

    def rows_in(self, sizes: tuple[int, ...]) -> int:
        """The size of a micro-batch in the dimension of its rows; 0 if it has none there."""
        return sizes[self.arrival.dimension] if self.arrival.dimension < len(sizes) else 0

    @property
    def samples_kept(self) -> float:
        return self.arrival.samples(self.rows_in(self._kept), self.asked) or self.asked

    @property
    def samples_counted(self) -> float:
        # The engine's setting if the batch shows none.
        return self.arrival.samples(self.rows_in(self._counted), self.asked) or self.asked

    @property
    def rows(self) -> list[int]:
        return [rows for sizes in self.sizes if (rows := self.rows_in(sizes))]

    def loss_arrived(self, loss: torch.Tensor) -> None:
        """Records the loss of one micro-batch, or of an optimizer step in a pipeline.

        Only a single number is a loss. The code may also pass outputs whose gradient it computes itself.
        """
        if loss.numel() != 1:
            return
        self.loss = loss.detach()
        self.micro_batch_losses.append(self.loss)

    def take_loss(self) -> torch.Tensor | None:
        """The value, on its device, that an optimizer step reduces, from the losses since the last call; None without.

        The step's gradient is that of the sum of all losses, each divided as DeepSpeed divides it.
        """
        losses, self.micro_batch_losses = self.micro_batch_losses, []
        if not losses:
            return None
        return torch.stack([loss.float().mean() for loss in losses]).sum() / self._losses_a_step()

    def _losses_a_step(self) -> int:
        return int(self.engine.gradient_accumulation_steps())

    def take_arrived(self) -> dict[str, float]:
        arrived, self._arrived = self._arrived, _nothing_arrived()
        return arrived

    def samples_in(self, arrived: Mapping[str, float]) -> float:
        """Samples in arrived sizes, by the rule for samples that is known by now."""
        return self.arrival.samples(arrived[_ROWS[self.arrival.dimension]], self.asked * arrived["micro_batches"])


class PipelineWatch(EngineWatch):
    """Watches a `PipelineEngine`. It times `train_batch`, and the parts by the instructions of the schedule."""

    _counter = StageCounter

    def _install(self) -> None:
        engine = self.engine

        def timed(part: str, name: str) -> Callable[..., Any]:
            return self.parts.timed(part, lambda *args, **kwargs: getattr(type(engine), name)(engine, *args, **kwargs))

        forward, backward = timed("forward", "_exec_forward_pass"), timed("backward", "_exec_backward_pass")
        step = timed("step", "_exec_optimizer_step")

        def watched_forward(_engine: Any, *args: Any, **kwargs: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(*args, **kwargs)
            return self.model.forward(forward, *args, **kwargs)

        def watched_backward(_engine: Any, *args: Any, **kwargs: Any) -> Any:
            return self.model.backward(backward, *args, **kwargs)

        def watched_step(_engine: Any, *args: Any, **kwargs: Any) -> Any:
            return step(*args, **kwargs)

        replaced = {
            "_exec_forward_pass": watched_forward,
            "_exec_backward_pass": watched_backward,
            "_exec_optimizer_step": watched_step,
        }
        # The schedule looks its instructions up in this map and binds them to the engine.
        engine._INSTRUCTION_MAP = {
            instruction: replaced.get(function.__name__, function)
            for instruction, function in type(engine)._INSTRUCTION_MAP.items()
        }
        engine_train_batch = engine.train_batch
        engine_next_batch = engine._next_batch

        def watched_train_batch(*args: Any, **kwargs: Any) -> Any:
            self.has_trained = True
            loss = engine_train_batch(*args, **kwargs)
            self.loss = None
            if isinstance(loss, torch.Tensor):
                self.loss_arrived(loss)
            self._observer.optimizer_step_ended(bool(engine.was_step_applied()))
            return loss

        def watched_next_batch() -> Any:
            batch = engine_next_batch()
            if engine.module.training and torch.is_grad_enabled() and any(True for _ in tensors_in(batch)):
                self.batch_arrived(batch)
            return batch

        engine.train_batch = watched_train_batch
        engine._next_batch = watched_next_batch

    def _losses_a_step(self) -> int:
        return 1


# The engines that follow a candidate: those that train

_BATCH = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)


def trains(optimizer: Any, config: Mapping[str, Any]) -> bool:
    """Whether an engine has an optimizer, by DeepSpeed's own rule."""
    named = config.get("optimizer")
    return optimizer is not None or (isinstance(named, Mapping) and named.get("type") is not None)


class Followers:
    """The engines of one run of a program that train. All of them follow the candidate, as the two of a GAN do.

    One loss may go through several engines, and DeepSpeed refuses that for engines of different stages. An engine whose
    own batch differs from the first one's, such as an actor's critic, keeps its batch.
    """

    def __init__(self) -> None:
        self._batches: list[dict[str, Any]] = []

    def start_over(self) -> None:
        self._batches.clear()

    def overrides_for(self, config: Mapping[str, Any], overrides: Mapping[str, Any]) -> Mapping[str, Any]:
        """The overrides for an engine that trains with `config` in the code; `overrides` are for the first engine."""
        own = {key: config[key] for key in _BATCH if key in config}
        candidates = {key: overrides[key] for key in _BATCH if key in overrides}
        if not self._batches:
            self._batches = [own]
        # The code may pass one dictionary twice. It then returns with the candidate's values, and with values that
        # follow from them.
        if own in self._batches or (candidates and candidates.items() <= own.items()):
            return overrides
        return {key: value for key, value in overrides.items() if key not in _BATCH}


_TOLD = (
    "This layout makes {asked} of {ranks} ranks, but the engine has {found}. Say in search_space what the switch is "
    "the size of (layout: tensor, sequence, pipeline or expert), or leave it out."
)


def part_of_replica(engine: Any) -> int:
    """A number that all ranks with the same part of the model, or of each sample, have in common."""
    if sequence_parallel_size(engine) > 1:
        from deepspeed.utils import groups

        return int(groups._get_sequence_parallel_rank())
    return min(torch.distributed.get_process_group_ranks(engine.data_parallel_group))


def refuse_other_replicas(engine: Any, asked: int | None, refuse: Callable[[str, str], Any]) -> None:
    """Refuses a trial whose engine has not the replicas of its layout, as its global batch would be another."""
    found = replicas_of(engine)
    if asked is not None and found != asked:
        ranks = torch.distributed.get_world_size()
        refuse("invalid", _TOLD.format(asked=_replicas(asked), ranks=ranks, found=_replicas(found)))


def _replicas(count: int) -> str:
    return "1 replica of the model" if count == 1 else f"{count} replicas of the model"
