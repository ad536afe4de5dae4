"""One foreseen run inside its rank: what is replaced before the program runs, and the record at the end."""

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.schedule import RecvGrad
from deepspeed.runtime.utils import PartitionedTensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed import distributed_c10d

from trial_lib.deepspeed_config.batch import replicas_of, sequence_parallel_size
from trial_lib.messages.folders import read_layer
from trial_lib.messages.foreseen_run import ForeseenRun, ForeseeOrder
from trial_lib.messages.orders import seconds_since
from trial_lib.plan.simulate import (
    accelerator,
    asks,
    checkpoint_headers,
    cuda_functions,
    engine_moments,
    fused_kernels,
    generated_text,
    kernel_packages,
    missing_kernels,
    pretended_device,
    written_devices,
)
from trial_lib.plan.simulate.asks import Asks
from trial_lib.plan.simulate.engine_moments import EngineMoments
from trial_lib.plan.simulate.fake_tensors import FakeTensors, tensors_in
from trial_lib.plan.simulate.logs import (
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    MemoryLog,
    OperationLog,
    sentence_of,
    status_bytes,
)
from trial_lib.rank import accelerate, batch_source, file_functions, huggingface_trainer, interception, redirects
from trial_lib.rank.imported_modules import ImportedModules
from trial_lib.rank.interception import intercept
from trial_lib.rank.patching import stand_in
from trial_lib.rank.program_facts import ProgramFacts
from trial_lib.rank.rank import versions_here
from trial_lib.rank.tensor_parallel import expert_ranks, parameter_shares, tensor_parallel_size
from trial_lib.rank.torch_functions import PlainSteps
from trial_lib.rank.user_files import LayeredFiles, UserFiles

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


# The pretended world: a process group of N ranks in which only rank 0 exists (torch's fake process group).


def install_world(world: int) -> None:
    """Makes every process group that the program asks for a pretended one. Call it before the program runs."""
    from torch.testing._internal.distributed import fake_pg

    original = torch.distributed.init_process_group

    def init_process_group(*args: Any, **kwargs: Any) -> None:
        original(backend="fake", store=fake_pg.FakeStore(), rank=0, world_size=world)

    stand_in("init_process_group", original, init_process_group)
    original_group = torch.distributed.new_group

    def new_group(ranks: Any = None, *args: Any, **kwargs: Any) -> Any:
        kept = {name: kwargs[name] for name in ("use_local_synchronization", "group_desc") if name in kwargs}
        return original_group(ranks, backend="fake", **kept)

    stand_in("new_group", original_group, new_group)

    def meets_at_once(*args: Any, **kwargs: Any) -> None:
        """The other ranks are there."""

    for name in ("barrier", "monitored_barrier"):
        stand_in(name, getattr(distributed_c10d, name), meets_at_once)

    def each_by_itself(p2p_op_list: list[Any]) -> list[Any]:
        # The original looks for a backend of the device.
        return [each.op(each.tensor, each.peer, group=each.group, tag=each.tag) for each in p2p_op_list]

    stand_in("batch_isend_irecv", distributed_c10d.batch_isend_irecv, each_by_itself)
    _receive_from_next_stage()


def _receive_from_next_stage() -> None:
    """Lets a stage of a pipeline know how a gradient is divided over its ranks of tensor parallelism.

    The next stage sends that along. It is the division of the activation, which has the same shape.
    """
    receive = PipelineEngine._INSTRUCTION_MAP[RecvGrad]

    @functools.wraps(receive)
    def received(engine: Any, buffer_id: int) -> None:
        receive(engine, buffer_id)
        if engine.is_pipe_partitioned and engine.is_grad_partitioned:
            division = engine.pipe_buffers["outputs"][buffer_id][0]
            engine.grad_partition_grad_layer_meta_cache = division.to("cpu")

    PipelineEngine._INSTRUCTION_MAP[RecvGrad] = received
    # DeepSpeed took this default from the host's own accelerator, when it was imported.
    PartitionedTensor.from_meta.__func__.__defaults__ = (pretended_device.NAME,)


class Foreseeing:
    """The run of one order. It observes `deepspeed.initialize`.

    `finished` is called after the last step with an empty text, or with the reason why there is none.
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
        # The device and the world, before DeepSpeed and the program look for them.
        pretended_device.install()
        accelerator.install(self._memory, order.device_bytes, order.ranks_per_host)
        install_world(order.world)
        intercept(order.overrides, self._facts, self, order.turned)
        accelerator.install_pretended_kernels(self._operations)
        batch_source.note_parsers()
        # The program's files, and what the Trainer and trackers write.
        layer = read_layer(scratch)
        self._layered = None if layer is None else LayeredFiles(layer)
        device = None if self._layered is None else self._layered.device
        before, model_dir = order.protected_before, Path(order.model_dir)
        self._files = file_functions.install(scratch, before, model_dir, device, order.hidden)
        to_save = self._files.to_prepare
        huggingface_trainer.install(self._facts, order.overrides, scratch, to_save, checkpoint_headers.saves_none)
        accelerate.install(self._facts)
        interception.install_zero_init(order.overrides, self._facts)
        redirects.install_trackers(scratch, self._files)
        # The logs, and the mode.
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
        asks.install()
        missing_kernels.install_mixed_precision()
        missing_kernels.install()
        fused_kernels.install(self._operations)
        kernel_packages.install(self._fake, self._operations)
        cuda_functions.install_asked_of_computers(self._asks)
        generated_text.install()
        kernel_packages.install_chosen_experts(self._asks)
        checkpoint_headers.install(self._fake.empty_on_host, self._fake.fakes, self._fake.ends_with)

    @property
    def has_engine(self) -> bool:
        return self._engine is not None

    def initialize_called(self) -> None:
        if self._engine is None:
            self._import_s = seconds_since(self._order.launched_at)
            # As a CPU's limit counts it, which a rank applies now.
            self._process_bytes = status_bytes("VmData")
        self._fake.in_engine = True

    def engine_built(self, engine: Any) -> None:
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
        if engine_moments.is_pipeline(engine):
            self._pipeline_stages = int(engine.num_stages)
            self._parameters = engine_moments.parameters_of(engine)
            self._notes.append(engine_moments.note_of(engine, self._parameters is not None))

    def frozen_engine_built(self) -> None:
        """An engine that does not train has memory and work like any other module."""
        self._fake.in_engine = False

    def group_destroyed(self) -> None: ...

    def _stepped(self, steps: int) -> None:
        name_kinds(self._engine, self._memory)
        if self._layered is not None and not self._files.is_training:
            self._layered.note_prepared(self._files.filled)
        self._files.training_began()
        if steps >= self._order.steps:
            self._moments.load_more()
            self._finished("")

    def record(self, stopped: str) -> ForeseenRun:
        """`stopped` is the reason why the run has not come to its last step; empty if it has."""
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
            notes=(*self._notes, *sorted(fused_kernels.notes)),
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
    # Makes each new parameter fake, so that no model takes memory.
    original = torch.nn.Parameter.__new__

    def new(cls: Any, data: Any = None, requires_grad: bool = True) -> Any:
        if isinstance(data, FakeTensor) and issubclass(type(data), torch.nn.Parameter):
            # Of a library's own class already. A module that moves asks for it once more.
            return data
        if type(data) in (torch.Tensor, torch.nn.Parameter) and data.device.type == "cpu":
            data = fake.parameter(data)
        return original(cls, data, requires_grad)

    torch.nn.Parameter.__new__ = staticmethod(new)  # type: ignore[method-assign]
    copied: Any = FakeTensor.__deepcopy__

    def deep_copied(parameter: Any, memo: dict[int, Any]) -> Any:
        """What DeepSpeed has attached to a parameter is no part of its copy."""
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
    # Ends the run with an error in a hook of the backward pass. Torch would abort the process.

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
