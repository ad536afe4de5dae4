"""The parts of a step: forward, backward, update and loading, from the calls of one DeepSpeed engine."""

import contextlib
import functools
import mmap
import statistics
import struct
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence, Sized
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.data import get_worker_info

from zerotune.trial_lib.deepspeed_config.overrides import replicas_of, sequence_parallel_size
from zerotune.trial_lib.plan.simulate import logs
from zerotune.trial_lib.plan.simulate.asks import CannotForeseeError
from zerotune.trial_lib.plan.simulate.fake_tensors import FakeTensors
from zerotune.trial_lib.plan.simulate.logs import GRADIENT, OPTIMIZER, PARAMETER, MemoryLog, OperationLog, heap_bytes
from zerotune.trial_lib.rank.loader_batches import batch_sizes, samples_of, tensors_in, tokens_in, tokens_per_row
from zerotune.trial_lib.rank.patching import Patch, Table, with_given
from zerotune.trial_lib.rank.tensor_parallel import expert_ranks, parameter_shares, tensor_parallel_size

# The parts of a step of a pipeline: DeepSpeed's engine for pipelines executes a schedule of instructions.

# By the names of the instructions in deepspeed/runtime/pipe/schedule.py. All others move tensors between stages.
_MOMENTS = {
    "LoadMicroBatch": logs.LOAD,
    "ForwardPass": logs.FORWARD,
    "BackwardPass": logs.BACKWARD,
    "OptimizerStep": logs.UPDATE,
}


def is_pipeline(engine: Any) -> bool:
    return hasattr(engine, "_INSTRUCTION_MAP")


def watch(engine: Any, begin: Callable[[int, int], None], stepped: Callable[[int], None]) -> None:
    """Follows an engine of a pipeline from now on.

    The forward pass of a micro-batch begins before the backward pass of an earlier one has. So each kind of instruction
    is counted by itself. What follows an instruction belongs to its micro-batch, and reductions to the last one.
    """
    if type(engine).__name__ == "DualPipeVEngine":
        raise CannotForeseeError(
            "DualPipeV cannot be foreseen, because each of its ranks has two stages and exchanges tensors both ways."
        )
    executions: Counter[str] = Counter()
    last = 0

    def micro_batch_of(name: str) -> int:
        nonlocal last
        if name.startswith("Reduce") or name == "OptimizerStep":
            last = engine.gradient_accumulation_steps() - 1
        else:
            last = executions[name]
            executions[name] += 1
        return last

    def watched(instruction: Any, execute: Callable[..., Any]) -> Callable[..., Any]:
        moment = _MOMENTS.get(instruction.__name__, logs.BETWEEN)

        @functools.wraps(execute)
        def executed(*args: Any, **kwargs: Any) -> Any:
            nonlocal last
            if not torch.is_grad_enabled():
                # An evaluation executes the same instructions.
                return execute(*args, **kwargs)
            steps = engine.global_steps
            begin(moment, micro_batch_of(instruction.__name__))
            out = execute(*args, **kwargs)
            if engine.global_steps > steps:
                executions.clear()
                last = 0
            begin(logs.BETWEEN, last)
            if engine.global_steps > steps:
                stepped(engine.global_steps)
            return out

        return executed

    engine._INSTRUCTION_MAP = {each: watched(each, execute) for each, execute in engine._INSTRUCTION_MAP.items()}


def parameters_of(engine: Any) -> tuple[int, int] | None:
    """The parameters of all stages, and of these the trained ones; None if a layer cannot be built here.

    Rank 0 has the layers of the first stage alone. It knows how the others are built, and torch's meta device makes
    them without memory, as no part of the run.
    """
    found: dict[int, nn.Parameter] = {}
    tied: set[str] = set()
    built = []
    for layer in engine.module._layer_specs:
        key = getattr(layer, "key", None)
        if key is not None and key in tied:
            continue
        tied |= set() if key is None else {key}
        if not isinstance(layer, nn.Module) and hasattr(layer, "build"):
            try:
                layer = _built(layer)
            except Exception:  # noqa: BLE001 - whatever the user's layer needs, it is only missing in a count
                return None
        if isinstance(layer, nn.Module):
            # Kept, so that no other parameter gets its id.
            built.append(layer)
            found |= {id(each): each for each in layer.parameters()}
    numbers = [(each.numel(), each.requires_grad) for each in found.values()]
    return sum(number for number, _ in numbers), sum(number for number, is_trained in numbers if is_trained)


def _built(spec: Any) -> Any:
    with contextlib.ExitStack() as stack:
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.enter_context(torch.device("meta"))
        return spec.build()


def _notes_of(engine: Any, are_counted: bool) -> list[str]:
    # The sentences for the reader of a run. `are_counted`: whether the parameters of all stages are known.
    notes = []
    config = getattr(engine.module, "config", None)
    takes_tokens = getattr(engine.module, "main_input_name", "input_ids") == "input_ids"
    if getattr(config, "is_encoder_decoder", False) and not takes_tokens:
        # Such as Whisper, whose encoder has spectra.
        notes.append("Tokens are those of the decoder alone. What the encoder takes are no tokens.")
    if is_pipeline(engine):
        note = (
            f"The run is that of the first of {engine.num_stages} stages of the pipeline. The others have other layers."
        )
        if not are_counted:
            note += " A layer cannot be built apart, so only this stage's parameters are counted."
        notes.append(note)
    return notes


# Of one worker process: seconds of its first batch, seconds and number of its other batches, and number of all workers.
_LOADED = struct.Struct("dddd")
_MOST_WORKERS = 64
# Further batches that a rank fetches after its last step, so that loading is no matter of one of them.
_FURTHER, _FURTHER_S = 8, 0.5
_SCHEDULED = Path("/proc/thread-self/schedstat")


def undisturbed_time() -> float:
    """Seconds of a clock that stands still while this thread waits for a processor that others have.

    Runs of a plan go on beside each other, so the clock on the wall would time them. Waits for a disk count.
    """
    try:
        waited = int(_SCHEDULED.read_text().split()[1]) / 1e9
    except (OSError, ValueError, IndexError):
        waited = 0.0  # a kernel without such statistics
    return time.perf_counter() - waited


class WorkersLoading:
    """What worker processes of data loaders take for a micro-batch, in memory that they have in common with the rank.

    `size` is the samples of the training's micro-batch, so that other loaders do not count; 0 before there is an
    engine.
    """

    def __init__(self) -> None:
        self.size = 0
        self._loaded = mmap.mmap(-1, _LOADED.size * _MOST_WORKERS)

    @property
    def of_a_batch(self) -> float | None:
        """Seconds between two micro-batches that all workers deliver together; None if no worker has loaded one.

        A worker's first batch pays for what runs once. It counts if the run has ended before any worker's second one.
        """
        each = [_LOADED.unpack_from(self._loaded, _LOADED.size * worker) for worker in range(_MOST_WORKERS)]
        later = [seconds / batches for _, seconds, batches, _ in each if batches]
        means = later or [first for first, *_ in each if first]
        return statistics.median(means) / max(workers for *_, workers in each) if means else None

    def fetch(self, original: Any, fetcher: Any, index: Any) -> Any:
        worker = get_worker_info()
        # Without a batch size a loader's indices are single ones, or none at all.
        samples = len(index) if isinstance(index, Sized) else 0
        if worker is None or worker.id >= _MOST_WORKERS or not self.size or samples != self.size:
            return original(fetcher, index)
        started = undisturbed_time()
        batch = original(fetcher, index)
        took, place = undisturbed_time() - started, _LOADED.size * worker.id
        first, seconds, batches, _ = _LOADED.unpack_from(self._loaded, place)
        later = (first, seconds + took, batches + 1) if first else (took, 0.0, 0.0)
        _LOADED.pack_into(self._loaded, place, *later, worker.num_workers)
        return batch


class EngineMoments:
    """Begins a moment of the logs with each call of the engine."""

    def __init__(
        self, fake: FakeTensors, memory: MemoryLog, operations: OperationLog, stepped: Callable[[int], None]
    ) -> None:
        self.tokens: int | None = None  # in a sample of the last batch; None if it shows none
        self.loading_s: list[float] = []  # real seconds to fetch each batch but the first of an iterator
        # That the program has taken between the engine's initialisation and its first forward pass.
        self.data_bytes = 0
        self._heap_bytes: int | None = None
        self._fetch: Any = None
        self._iterator: Any = None
        # The first two dimensions of each micro-batch, and samples and tokens of those of a step.
        self._seen: list[tuple[int, ...]] = []
        self._of_step: list[tuple[int, int]] = []
        self._last_step: list[tuple[int, int]] = []
        self.workers = WorkersLoading()
        self._fake, self._memory, self._operations, self._stepped = fake, memory, operations, stepped
        self._engine: Any = None
        # Of this step so far, and whether a forward pass still waits for its own.
        self._backwards = 0
        self._waits = False
        self._has_short_step = False
        self._of_pipeline: int | None = None
        self._parameters: tuple[int, int] | None = None  # of all stages of a pipeline
        self.notes: list[str] = []  # what a plan of the run says of its engine
        self._moment = logs.INITIALIZE
        memory.begin(logs.INITIALIZE, 0, 0, 0)

    def next_batch(self, original: Any, iterator: Any) -> Any:
        """What a data loader delivers, as a part of the run."""
        self._fetch = original
        before = self._moment
        # The first of an iterator starts workers, and much runs there for the first time.
        is_first = iterator._num_yielded == 0
        if is_first and self._engine is not None:
            _require_a_batch(iterator, self._engine)
        self._begin(logs.LOAD)
        started = undisturbed_time()
        try:
            # What a loader does is real, and worker processes know no mode.
            with _disable_current_modes(), _Unpinned():  # type: ignore[no-untyped-call]
                batch = original(iterator)
            # The end of an epoch has raised an exception.
            if self._engine is not None and not is_first:
                self.loading_s.append(undisturbed_time() - started)
                self._iterator = iterator
            return batch
        finally:
            self._begin(logs.INITIALIZE if before == logs.INITIALIZE else logs.BETWEEN)

    def pass_back(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        if self._moment == logs.BACKWARD or not self._waits:
            return original(*args, **kwargs)
        self._begin(logs.BACKWARD)
        try:
            return original(*args, **kwargs)
        finally:
            self._passed_back()

    def load_more(self) -> None:
        """Fetches further batches as the last one, if the rank itself loads. Call it after the last step."""
        began = time.perf_counter()
        if self._iterator is None or self.workers.of_a_batch is not None:
            return
        with contextlib.suppress(Exception), _disable_current_modes(), _Unpinned():  # type: ignore[no-untyped-call]
            # The data may end.
            while len(self.loading_s) < _FURTHER and time.perf_counter() - began < _FURTHER_S:
                started = undisturbed_time()
                self._fetch(self._iterator)
                self.loading_s.append(undisturbed_time() - started)

    def _note_batch(self, inputs: Any) -> None:
        # Notes the size of a micro-batch. Ulysses gives a rank its part of each sample.
        parts = sequence_parallel_size(self._engine)
        tokens, sizes = tokens_in(inputs), batch_sizes(inputs)
        rows = sizes[0] if sizes else 0
        self._seen.append(sizes)
        self._of_step.append((rows, 0 if tokens is None else tokens * parts))
        row = tokens_per_row(inputs)
        self.tokens = self.tokens if row is None else row * parts

    @property
    def rows(self) -> float | None:
        """Samples of a micro-batch of the last step, if micro-batches differ in them; None if they do not."""
        asked = self._engine.train_micro_batch_size_per_gpu() if self._engine is not None else 0
        first, second = ({sizes[axis] for sizes in self._seen if axis < len(sizes)} for axis in (0, 1))
        # Else the first dimension is a length, and the second has the samples.
        varies = len(first) > 1 and second != {asked}
        return sum(rows for rows, _ in self._last_step) / len(self._last_step) if varies and self._last_step else None

    @property
    def samples_per_epoch(self) -> int | None:
        """As `samples_of` the iterator of the last batch that was read to train on."""
        return samples_of(self._iterator)

    @property
    def tokens_of_a_row(self) -> int | None:
        """Tokens in a sample of the last step; None if the batches show none."""
        rows, tokens = (sum(each[part] for each in self._last_step) for part in (0, 1))
        return round(tokens / rows) if self.rows is not None and tokens else self.tokens

    def watch(self, engine: Any) -> None:
        self._engine = engine
        self.workers.size = engine.train_micro_batch_size_per_gpu()
        self._heap_bytes = heap_bytes()
        forward, backward, step = engine.forward, engine.backward, engine.step

        # A model of `from_pretrained` is in this mode, and many programs leave it so.
        trains_in_eval_mode = not engine.module.training

        def watched_forward(*args: Any, **kwargs: Any) -> Any:
            nonlocal trains_in_eval_mode
            trains_in_eval_mode &= not engine.module.training
            if torch.is_grad_enabled() and (engine.module.training or trains_in_eval_mode):
                self._note_batch([args, kwargs])
                self._begin(logs.FORWARD)
                self._waits = True
                if self._heap_bytes is not None:
                    # The data sets, once.
                    self.data_bytes = max(0, heap_bytes() - self._heap_bytes)
                    self._heap_bytes = None
            return forward(*args, **kwargs)

        def watched_backward(*args: Any, **kwargs: Any) -> Any:
            self._begin(logs.BACKWARD)
            with self.in_engine():
                out = backward(*args, **kwargs)
            self._passed_back()
            return out

        def watched_step(*args: Any, **kwargs: Any) -> Any:
            steps = engine.global_steps
            self._begin(logs.UPDATE)
            with self.in_engine():
                out = step(*args, **kwargs)
            if engine.global_steps > steps:
                self._backwards, self._last_step, self._of_step = 0, self._of_step, []
            self._begin(logs.BETWEEN)
            if engine.global_steps > steps:
                self._stepped(engine.global_steps)
            return out

        engine.forward, engine.backward, engine.step = watched_forward, watched_backward, watched_step
        if is_pipeline(engine):
            watch(engine, self._begin, self._stepped)
            self._parameters = parameters_of(engine)
        else:
            self._shorten_first_step()
        self.notes += _notes_of(engine, self._parameters is not None)
        _leave_out_comparison()
        self._begin(logs.BETWEEN)

    def of_engine(self) -> dict[str, Any]:
        """The fields of a `ForeseenRun` that its engine knows; none before there is one."""
        engine = self._engine
        if engine is None:
            return {}
        numbers = [(getattr(each, "ds_numel", each.numel()), each) for each in engine.module.parameters()]
        sums: Sequence[float] = (
            sum(number for number, _ in numbers),
            sum(number for number, each in numbers if each.requires_grad),
        )
        divided = tensor_parallel_size(engine)
        if divided > 1 or expert_ranks(engine.module) > 1:
            sums = [divided * sequence_parallel_size(engine) * share for share in parameter_shares(engine)[:2]]
        parameters, trainable = map(round, self._parameters or sums)
        return {
            "replicas": replicas_of(engine),
            "sequence_ranks": sequence_parallel_size(engine),
            "micro_batch": int(engine.train_micro_batch_size_per_gpu()),
            "accumulation": int(engine.gradient_accumulation_steps()),
            "parameters": parameters,
            "trainable": trainable,
            "is_pipeline": is_pipeline(engine),
            "pipeline_stages": int(engine.num_stages) if is_pipeline(engine) else 1,
            "ds_config": dict(engine._config._param_dict),
            "stage": int(engine.zero_optimization_stage()),
            "formats": self._operations.multiplied_in(),
        }

    @contextlib.contextmanager
    def in_engine(self) -> Iterator[None]:
        before, self._fake.in_engine = self._fake.in_engine, True
        try:
            yield
        finally:
            self._fake.in_engine = before

    def _shorten_first_step(self) -> None:
        """Makes the first optimizer step one of a single micro-batch, if the engine itself counts them.

        The first step leaves optimizer states, and the order in which ZeRO 3 gathers parameters. One micro-batch does
        that, and the second step shows the rest.

        A program may count micro-batches itself, and tell the engine which of them exchange no gradients (`no_sync`).
        Its first step stays whole. So does that of ZenFlow, whose updates follow the engine's count
        (deepspeed/runtime/zenflow/engine.py).
        """
        engine = self._engine
        if getattr(engine, "zenflow", False):
            return
        self._has_short_step = True
        engine.micro_steps = engine.gradient_accumulation_steps() - 1
        without_exchange: Any = getattr(engine, "no_sync", None)

        def no_sync() -> Any:
            if self._has_short_step and engine.global_steps == 0:
                self._has_short_step = False
                engine.micro_steps = 0
            return without_exchange()

        if without_exchange is not None:
            engine.no_sync = no_sync

    def _passed_back(self) -> None:
        self._backwards += self._waits
        self._waits = False
        self._begin(logs.BETWEEN)

    def _begin(self, moment: int, micro_batch: int | None = None) -> None:
        self._moment = moment
        if micro_batch is not None:
            self._of_pipeline = micro_batch
        step = number = 0
        if self._engine is not None:
            step, number = self._engine.global_steps + 1, self._micro_batch()
        self._memory.begin(moment, step, number, len(self._operations))

    def _micro_batch(self) -> int:
        # Which micro-batch of the step it is, from 0.
        if self._of_pipeline is not None:
            return self._of_pipeline
        engine = self._engine
        of_step: int = engine.gradient_accumulation_steps()
        if _steps_at_the_end_alone(engine):
            return min(self._backwards, of_step - 1)
        if self._has_short_step and engine.global_steps == 0:
            return 0
        return int(engine.micro_steps) % of_step


def _leave_out_comparison() -> None:
    """Leaves out that ranks compare the order in which ZeRO 3 gathers parameters, until it is complete.

    In a run that would be in the second step, which stands for all others. They are without it.
    """
    coordinator: Any = sys.modules.get("deepspeed.runtime.zero.partitioned_param_coordinator")
    if coordinator is not None:
        coordinator.assert_ints_same_as_other_ranks = lambda ints: None


def _steps_at_the_end_alone(engine: Any) -> bool:
    """Whether the program calls `step` after the last micro-batch alone, as Accelerate does.

    The engine counts the calls of `step` (`micro_steps`). A program leaves the other calls out if it says itself which
    micro-batch is the last (`set_gradient_accumulation_boundary` in deepspeed/runtime/engine.py), or if its
    configuration says that `step` ends the accumulation (`managed_gradient_accumulation`, in newer DeepSpeeds).
    """
    manages = getattr(engine, "managed_gradient_accumulation", None)
    return engine._is_gradient_accumulation_boundary is not None or (manages is not None and not manages())


class _Unpinned(TorchDispatchMode):
    """Makes tensors that are not page-locked, because the pretended device locks no pages. They are real, and small."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **{name: value for name, value in (kwargs or {}).items() if name != "pin_memory"})


def _require_a_batch(iterator: Any, engine: Any) -> None:
    """Refuses a first step, or a first batch of the second, without whole micro-batches.

    A smaller batch would be taken for a whole one.
    """
    batches = getattr(iterator, "_index_sampler", None)
    size, samples = getattr(batches, "batch_size", None), getattr(batches, "sampler", None)
    if size != engine.train_micro_batch_size_per_gpu() or not engine.module.training:
        return
    try:
        count = len(samples)  # type: ignore[arg-type]
    except (TypeError, NotImplementedError):
        return
    if 0 < count < size:
        raise CannotForeseeError(
            f"The data set gives each rank {count} samples, which are fewer than a micro-batch of {size} has. Use more "
            "data, fewer devices or smaller batches."
        )
    is_cut = count % size and not getattr(batches, "drop_last", False)
    if is_cut and count // size == engine.gradient_accumulation_steps():
        raise CannotForeseeError(
            f"The data set gives each rank {count} samples, so the second step has {count % size} of the {size} of a "
            "micro-batch. Use more data, fewer devices or smaller batches."
        )


_LOADS = "A data loader's work is real, is timed, and is a part of the step."
_BACKWARD = "A backward pass may bypass the engine."
PATCHES: Table = (
    Patch(
        "torch.utils.data._utils.fetch",
        "_MapDatasetFetcher.fetch _IterableDatasetFetcher.fetch",
        "Worker processes of loaders are timed.",
        with_given(lambda moments, original, *args: moments.workers.fetch(original, *args)),
    ),
    Patch(
        "torch.utils.data.dataloader",
        "_BaseDataLoaderIter.__next__",
        _LOADS,
        with_given(EngineMoments.next_batch),
    ),
    Patch(
        "torch",
        "Tensor.backward autograd.backward",
        _BACKWARD,
        with_given(EngineMoments.pass_back),
    ),
)


# The kinds of an engine's tensors: parameters, gradients, and the states of its optimizer.

# deepspeed/runtime: zero/stage_1_and_2.py, zero/stage3.py, bf16_optimizer.py, fp16/unfused_optimizer.py. Master copies,
# and gradients that are kept.
_MASTERS = (
    "single_partition_of_fp32_groups",
    "fp32_partitioned_groups_flat",
    "fp32_groups_flat_partition",
    "fp32_groups_flat",
    "fp32_groups",
)
_GRADIENTS = (
    "averaged_gradients",
    "grad_partitions_flat_buffer",
    "fp32_groups_gradients_flat",
    "fp32_groups_gradients",
    "bf16_groups_gradients",
)
_PARAMETERS = ("bit16_groups_flat", "fp16_groups_flat", "bf16_groups_flat", "fp16_partitioned_groups_flat")


def name_kinds(engine: Any, memory: MemoryLog) -> None:
    """Names the kinds of all tensors that the engine holds now."""
    optimizer = engine.optimizer
    basic = getattr(engine, "basic_optimizer", None)
    for names, kind in ((_MASTERS, OPTIMIZER), (_GRADIENTS, GRADIENT)):
        for name in names:
            for tensor in tensors_in(getattr(optimizer, name, None)):
                memory.name(tensor, kind)
                memory.name(tensor.grad if tensor.is_leaf else None, GRADIENT)
    for state in getattr(basic, "state", {}).values():
        for tensor in tensors_in(state):
            memory.name(tensor, OPTIMIZER)
    for name in _PARAMETERS:
        for tensor in tensors_in(getattr(optimizer, name, None)):
            memory.name(tensor, PARAMETER)
    for parameter in engine.module.parameters():
        memory.name(parameter, PARAMETER)
        memory.name(getattr(parameter, "ds_tensor", None), PARAMETER)
        memory.name(parameter.grad, GRADIENT)


def name_gradients(engine: Any, memory: MemoryLog) -> None:
    """Names the gradient of each parameter when the backward pass makes it."""
    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: memory.name(gradient, GRADIENT))
