"""The kinds of an engine's tensors: parameters, gradients, and the states of its optimizer."""

from collections.abc import Iterator
from typing import Any

import torch

from trial_lib.foresee.inside.memory_log import GRADIENT, OPTIMIZER, PARAMETER, MemoryLog

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
            for tensor in _tensors(getattr(optimizer, name, None)):
                memory.name(tensor, kind)
                memory.name(tensor.grad if tensor.is_leaf else None, GRADIENT)
    for state in getattr(basic, "state", {}).values():
        for tensor in _tensors(state):
            memory.name(tensor, OPTIMIZER)
    for name in _PARAMETERS:
        for tensor in _tensors(getattr(optimizer, name, None)):
            memory.name(tensor, PARAMETER)
    for parameter in engine.module.parameters():
        memory.name(parameter, PARAMETER)
        memory.name(getattr(parameter, "ds_tensor", None), PARAMETER)
        memory.name(parameter.grad, GRADIENT)


def name_gradients(engine: Any, memory: MemoryLog) -> None:
    """Names the gradient of each parameter when the backward pass makes it."""

    def name(gradient: torch.Tensor) -> None:
        memory.name(gradient, GRADIENT)

    for parameter in engine.module.parameters():
        if parameter.requires_grad:
            parameter.register_hook(name)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for each in value.values():
            yield from _tensors(each)
    elif isinstance(value, (list, tuple)):
        for each in value:
            yield from _tensors(each)
