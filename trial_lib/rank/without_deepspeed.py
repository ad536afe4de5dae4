"""The program's training without DeepSpeed: DDP or FSDP2 takes its place, and is measured as an engine is.

Accelerate, the Hugging Face Trainer and Lightning turn DeepSpeed on by an argument, a file or a variable. Here they are
told otherwise before the program runs, so its code stays as it is. The wrapped model stands for the engine
(`PlainEngine`), and the probe counts its micro-batches and optimizer steps as those of an engine.
"""

import os
import types
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH
from zerotune.trial_lib.rank.engine_watch import EngineWatch
from zerotune.trial_lib.rank.patching import replace, stand_in, when_imported

_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")
_NOT_PARTITIONED = "Its framework does not partition the model by FSDP2 here. Accelerate never does on a CPU."
_NO_FSDP2 = (
    "Lightning has FSDP2 in its ModelParallelStrategy alone, which needs a `configure_model` in your code that "
    "partitions the model."
)


class PlainWatch(EngineWatch):
    """Watches a `PlainEngine`, whose losses are divided by the accumulation before their backward pass."""

    def _losses_a_step(self) -> int:
        return 1


class PlainEngine:
    """A model that trains without DeepSpeed, with what the probe asks of an engine. Its optimizer is the first one with
    parameters of the model that makes a step.
    """

    watched_by = PlainWatch
    has_moe_layers = False
    inside_no_sync_ctxt = True  # the framework alone knows which backward pass ends an accumulation
    clips_before_its_step = True  # so a norm that is taken at the step is no norm before clipping
    is_gradient_accumulation_boundary = was_step_applied = staticmethod(lambda: True)
    get_global_grad_norm = staticmethod(lambda: None)

    def __init__(self, model: Any, overrides: Mapping[str, Any]) -> None:
        is_wrapped = isinstance(model, torch.nn.parallel.DistributedDataParallel)
        self.module: Any = model.module if is_wrapped else model
        self.optimizer: torch.optim.Optimizer | None = None
        self.device = next(self.module.parameters()).device
        self.dp_world_size = torch.distributed.get_world_size() if torch.distributed.is_initialized() else 1
        self.data_parallel_group = torch.distributed.group.WORLD
        self._overrides = overrides
        self._forward = model.forward
        # The watch replaces this engine's method later.
        model.forward = lambda *args, **kwargs: self.forward(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self._forward(*args, **kwargs)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def scale(self, loss: torch.Tensor) -> torch.Tensor:
        return loss

    def step(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        return step(*args, **kwargs)

    def owns(self, optimizer: torch.optim.Optimizer) -> bool:
        if self.optimizer is None:
            own = set(map(id, self.module.parameters()))
            if any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
                self.optimizer = optimizer
        return self.optimizer is optimizer

    def train_micro_batch_size_per_gpu(self) -> int:
        return int(self._overrides[MICRO_BATCH])

    def gradient_accumulation_steps(self) -> int:
        return int(self._overrides[ACCUMULATION])

    def train_batch_size(self) -> int:
        return self.train_micro_batch_size_per_gpu() * self.gradient_accumulation_steps() * self.dp_world_size


def install(kind: str, overrides: Mapping[str, Any], observer: Any) -> None:
    """Makes the program train without DeepSpeed, by `ddp` or `fsdp2`, with the batch of the overrides. The variables of
    Accelerate are those of a launch without DeepSpeed already (`inputs/accelerate.py`). `observer` is the probe.
    """
    import deepspeed

    engines: list[PlainEngine] = []

    def built(model: torch.nn.Module) -> None:
        if not engines and any(each.requires_grad for each in model.parameters()):
            if kind == "fsdp2" and not any(hasattr(each, "to_local") for each in model.parameters()):
                observer.refuse("invalid", _NOT_PARTITIONED)
            engines.append(PlainEngine(model, overrides))
            observer.engine_built(engines[0])

    def wrap(original: Callable[..., None], model: Any, *args: Any, **kwargs: Any) -> None:
        if not engines:
            observer.initialize_called()
        original(model, *args, **kwargs)
        built(model)

    def prepare(original: Callable[..., Any], accelerator: Any, *objects: Any, **kwargs: Any) -> Any:
        prepared = original(accelerator, *objects, **kwargs)
        # FSDP2, which comes in a list, and a lone rank have no wrapper.
        for each in prepared if isinstance(prepared, (tuple, list)) else (prepared,):
            if isinstance(each, torch.nn.Module) and not engines:
                observer.initialize_called()
                built(each)
        return prepared

    def make_optimizer(original: Callable[..., None], optimizer: Any, *args: Any, **kwargs: Any) -> None:
        original(optimizer, *args, **kwargs)

        def step(itself: Any, *args: Any, **kwargs: Any) -> Any:
            plain = partial(type(itself).step, itself)
            if engines and engines[0].owns(itself):
                return engines[0].step(plain, *args, **kwargs)
            return plain(*args, **kwargs)

        # A method, because a schedule of the learning rate takes it for one.
        optimizer.step = types.MethodType(step, optimizer)

    def scale(original: Callable[..., Any], scaler: Any, outputs: Any) -> Any:
        return original(scaler, engines[0].scale(outputs) if engines and torch.is_tensor(outputs) else outputs)

    def make_accelerator(original: Callable[..., None], accelerator: Any, *args: Any, **kwargs: Any) -> None:
        for name in ("deepspeed_plugin", "deepspeed_plugins"):
            kwargs.pop(name, None)
        original(accelerator, *args, **kwargs)

    def follow_accelerate(module: ModuleType) -> None:
        replace(module.Accelerator, "__init__", make_accelerator)
        replace(module.Accelerator, "prepare", prepare)

    def check_arguments(original: Callable[..., None], arguments: Any) -> None:
        arguments.deepspeed = None
        precision = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
        if precision in ("bf16", "fp16"):
            setattr(arguments, precision, True)
        if kind == "fsdp2":
            arguments.fsdp, arguments.fsdp_config = "full_shard auto_wrap", {"version": 2}
        original(arguments)

    def make_trainer(original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        if kind == "fsdp2":
            observer.refuse("invalid", _NO_FSDP2)
        original(trainer, *args, **{**kwargs, "strategy": "ddp"})

    def initialize(*args: Any, **kwargs: Any) -> None:
        observer.refuse("invalid", "The code calls deepspeed.initialize whatever its framework is told.")

    stand_in("initialize", deepspeed.initialize, initialize)
    replace(torch.nn.parallel.DistributedDataParallel, "__init__", wrap)
    replace(torch.optim.Optimizer, "__init__", make_optimizer)
    replace(torch.amp.GradScaler, "scale", scale)
    when_imported("accelerate.accelerator", follow_accelerate)
    when_imported(
        "transformers.training_args", lambda it: replace(it.TrainingArguments, "__post_init__", check_arguments)
    )
    for name in _LIGHTNING:
        when_imported(name, lambda module: replace(module.Trainer, "__init__", make_trainer))
