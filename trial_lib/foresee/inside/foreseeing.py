"""One foreseen run inside its rank: what is replaced before the program runs, and the record at the end."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from trial_lib.deepspeed_config.engine_replicas import replicas_of, sequence_parallel_size
from trial_lib.foresee.inside import (
    accelerator,
    pipeline_moments,
    pretended_device,
    pretended_kernels,
    pretended_world,
)
from trial_lib.foresee.inside.asks import Asks
from trial_lib.foresee.inside.engine_moments import EngineMoments
from trial_lib.foresee.inside.engine_tensors import name_gradients, name_kinds
from trial_lib.foresee.inside.fake_tensors import FakeTensors
from trial_lib.foresee.inside.libraries import (
    asked_numbers,
    asked_of_computers,
    attention_kernels,
    checkpoint_headers,
    chosen_experts,
    cuda_functions,
    fused_kernels,
    generated_text,
    kernel_packages,
    missing_kernels,
    mixed_precision,
    written_devices,
)
from trial_lib.foresee.inside.memory_log import MemoryLog
from trial_lib.foresee.inside.operation_log import OperationLog
from trial_lib.foresee.inside.process_memory import status_bytes
from trial_lib.foresee.inside.program_lines import sentence_of
from trial_lib.leave_alone import file_functions, trackers
from trial_lib.leave_alone.layered_files import LayeredFiles
from trial_lib.leave_alone.user_files import UserFiles
from trial_lib.measure.batches import program_options
from trial_lib.measure.imported_modules import ImportedModules
from trial_lib.measure.libraries import accelerate, huggingface_trainer, zero_init
from trial_lib.measure.libraries.interception import intercept
from trial_lib.measure.plain_steps import PlainSteps
from trial_lib.measure.program_facts import ProgramFacts
from trial_lib.measure.tensor_parallel import expert_ranks, parameter_shares, tensor_parallel_size
from trial_lib.measure.versions import versions_here
from trial_lib.wire.foresee_order import ForeseeOrder
from trial_lib.wire.foreseen_run import ForeseenRun
from trial_lib.wire.layer import read_layer
from trial_lib.wire.moments import seconds_since


class Foreseeing:
    """The run of one order. It observes `deepspeed.initialize`.

    Args:
        order: the run.
        finished: called after the last step with an empty text, or with the reason why there is none.
    """

    def __init__(self, order: ForeseeOrder, finished: Any) -> None:
        self._order, self._finished = order, finished
        self._facts = ProgramFacts()
        self._plain_steps = PlainSteps(lambda outcome, reason: finished(reason))
        self._memory, self._operations, self._asks = MemoryLog(), OperationLog(), Asks()
        self._fake = FakeTensors(self._memory, self._operations, self._asks)
        self._fake.ends_with = lambda error: finished(sentence_of(error))
        self._moments = EngineMoments(self._fake, self._memory, self._operations, self._stepped)
        self._engine: Any = None
        self._import_s = 0.0
        self._process_bytes = 0
        self._notes: list[str] = []
        self._imports = ImportedModules()
        self._files: UserFiles
        self._layered: LayeredFiles | None = None
        self._parameters: tuple[int, int] | None = None
        self._pipeline_stages = 0

    def install(self) -> None:
        """Replaces what has to be replaced, and enters the mode. Call it before the program runs."""
        order, scratch = self._order, Path(self._order.scratch)
        pretended_device.install()
        accelerator.install(self._memory, order.device_bytes, order.ranks_per_host)
        pretended_world.install(order.world)
        intercept(order.overrides, self._facts, self, order.turned)
        pretended_kernels.install(self._operations)
        program_options.note_parsers()
        layer = read_layer(scratch)
        self._layered = None if layer is None else LayeredFiles(layer)
        device = None if self._layered is None else self._layered.device
        before, model_dir = order.protected_before, Path(order.model_dir)
        self._files = file_functions.install(scratch, before, model_dir, device, order.hidden)
        to_save = self._files.to_prepare
        huggingface_trainer.install(self._facts, order.overrides, scratch, to_save, checkpoint_headers.saves_none)
        accelerate.install(self._facts)
        zero_init.install(order.overrides, self._facts)
        trackers.install(scratch, self._files)
        self._moments.install()
        self._plain_steps.begin()
        self._operations.install()
        _fake_parameters(self._fake)
        _end_with_hooks(self._fake)
        self._follow_libraries()
        self._imports.follow()
        self._fake.__enter__()  # type: ignore[no-untyped-call]

    def _follow_libraries(self) -> None:
        order = self._order
        written_devices.install(self._fake, self._memory)
        device = cuda_functions.AskedDevice(order.device_name, order.device_bytes, order.capability)
        cuda_functions.install(self._memory, device, order.ranks_per_host)
        asked_numbers.install()
        mixed_precision.install()
        missing_kernels.install()
        fused_kernels.install(self._operations)
        kernel_packages.install(self._fake, self._operations)
        asked_of_computers.install(self._asks)
        generated_text.install()
        chosen_experts.install(self._asks)
        checkpoint_headers.install(self._fake.empty_on_host, self._fake.fakes, self._fake.ends_with)

    @property
    def has_engine(self) -> bool:
        """Whether an engine that trains exists."""
        return self._engine is not None

    def initialize_called(self) -> None:
        """Ends the program's preparation."""
        if self._engine is None:
            self._import_s = seconds_since(self._order.launched_at)
            # As a CPU's limit counts it, which a rank applies now.
            self._process_bytes = status_bytes("VmData")
        self._fake.in_engine = True

    def engine_built(self, engine: Any) -> None:
        """Follows the first engine that trains."""
        self._fake.in_engine = False
        if self._engine is not None:
            return
        self._plain_steps.end()
        self._engine = engine
        self._facts.note_varied(self._order.varied_options)
        name_kinds(engine, self._memory)
        name_gradients(engine, self._memory)
        self._operations.name_modules(engine.module)
        self._moments.watch(engine)
        config = getattr(engine.module, "config", None)
        takes_tokens = getattr(engine.module, "main_input_name", "input_ids") == "input_ids"
        if getattr(config, "is_encoder_decoder", False) and not takes_tokens:
            # Such as Whisper, whose encoder has spectra.
            self._notes.append("Tokens are those of the decoder alone. What the encoder takes are no tokens.")
        if pipeline_moments.is_pipeline(engine):
            self._pipeline_stages = int(engine.num_stages)
            self._parameters = pipeline_moments.parameters_of(engine)
            self._notes.append(pipeline_moments.note_of(engine, self._parameters is not None))

    def frozen_engine_built(self) -> None:
        """Does nothing: an engine that does not train has memory and work like any other module."""
        self._fake.in_engine = False

    def group_destroyed(self) -> None:
        """Does nothing."""

    def _stepped(self, steps: int) -> None:
        name_kinds(self._engine, self._memory)
        if self._layered is not None and not self._files.is_training:
            self._layered.note_prepared(self._files.filled)
        self._files.training_began()
        if steps >= self._order.steps:
            self._moments.load_more()
            self._finished("")

    def record(self, stopped: str) -> ForeseenRun:
        """Returns the record of the run so far.

        Args:
            stopped: the reason why it has not come to its last step; empty if it has.
        """
        storages, events, moments = self._memory.record()
        beside, rows = self._moments.workers.of_a_batch, self._moments.rows
        self._facts.batch_varies |= rows is not None
        self._facts.samples_per_epoch = self._moments.samples_per_epoch
        return ForeseenRun(
            world=self._order.world,
            **self._of_engine(),
            tokens=self._moments.tokens_of_a_row,
            rows=rows,
            program=self._facts.to_json(),
            dtypes=tuple(self._operations.dtypes),
            modules=tuple(self._operations.modules),
            storages=storages,
            events=events,
            moments=moments,
            operations=self._operations.record(),
            asks=self._asks.record(),
            loading_s=tuple(self._moments.loading_s) if beside is None else (beside,),
            loads_beside=beside is not None,
            import_s=self._import_s,
            seconds=seconds_since(self._order.launched_at),
            peak_bytes=status_bytes("VmHWM"),
            data_bytes=self._moments.data_bytes,
            process_bytes=self._process_bytes,
            notes=(*self._notes, *sorted(attention_kernels.notes)),
            imported=tuple(self._imports.found()),
            versions=versions_here(),
            stopped=stopped,
        )

    def _of_engine(self) -> dict[str, Any]:
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
            "is_pipeline": self._pipeline_stages > 0,
            "pipeline_stages": max(1, self._pipeline_stages),
            "ds_config": dict(engine._config._param_dict),
            "stage": int(engine.zero_optimization_stage()),
            "formats": self._operations.multiplied_in(),
        }


def _fake_parameters(fake: FakeTensors) -> None:
    """Makes each new parameter fake, so that no model takes memory."""
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        """Replaces `torch.nn.Parameter.__new__`."""
        if isinstance(data, FakeTensor) and issubclass(type(data), torch.nn.Parameter):
            # Of a library's own class already. A module that moves asks for it once more.
            return data
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
            data = fake.parameter(data)
        return original(cls, data, requires_grad)

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
    copied: Any = FakeTensor.__deepcopy__

    def deep_copied(parameter: Any, memo: dict[int, Any]) -> Any:
        """Replaces `FakeTensor.__deepcopy__`. What DeepSpeed has attached to a parameter is no part of its copy."""
        if type(parameter) is not FakeTensor or not isinstance(parameter, torch.nn.Parameter):
            return copied(parameter, memo)
        if id(parameter) not in memo:
            memo[id(parameter)] = torch.nn.Parameter(parameter.data.clone(), parameter.requires_grad)
        return memo[id(parameter)]

    FakeTensor.__deepcopy__ = deep_copied  # type: ignore[method-assign]
    # A module that changes its device or type swaps the inside of its fake parameters (torch.utils.swap_tensors), which
    # keeps their identity. Torch refuses that for a parameter to which a weak reference exists, such as DeepSpeed's
    # (deepspeed/utils/debug.py). That reference is to the Python object, and stays true.
    torch.utils.weakref = SimpleNamespace(getweakrefs=lambda tensor: [])  # type: ignore[attr-defined,assignment]


def _end_with_hooks(fake: FakeTensors) -> None:
    """Ends the run with an error in a hook of the backward pass. Torch would abort the process."""

    def ending(register: Any) -> Callable[..., Any]:
        @functools.wraps(register)
        def register_hook(self: Any, hook: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            @functools.wraps(hook)
            def watched(*inputs: Any) -> Any:
                try:
                    return hook(*inputs)
                except Exception as error:
                    fake.ends_with(error)
                    raise

            return register(self, watched, *args, **kwargs)

        return register_hook

    for owner, names in (
        (torch.Tensor, ("register_hook", "register_post_accumulate_grad_hook")),
        (torch.nn.Module, ("register_full_backward_hook", "register_full_backward_pre_hook")),
    ):
        for name in names:
            setattr(owner, name, ending(getattr(owner, name)))
