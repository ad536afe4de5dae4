"""Stand-ins for DeepSpeed's compiled ops. They compute nothing, and note the work that the op does."""

from collections.abc import Callable
from typing import Any

import torch

from trial_lib.foresee.inside.asks import CannotForeseeError
from trial_lib.foresee.inside.operation_log import OperationLog

# Arithmetic of Adam for one parameter, roughly: two moments, a root, a division and the step.
_ADAM_FLOPS = 15


class _FusedAdam:
    """The op of `FusedAdam` (deepspeed/ops/adam/fused_adam.py)."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def multi_tensor_adam(self, chunk: int, overflow: Any, tensors: list[list[torch.Tensor]], *settings: Any) -> None:
        """Notes the update of all parameters."""
        gradients, parameters, first, second = tensors
        numbers = sum(each.numel() for each in parameters)
        read = sum(each.numel() * each.element_size() for each in gradients)
        written = sum(each.numel() * each.element_size() for part in (parameters, first, second) for each in part)
        self._operations.work("update", parameters[0], float(_ADAM_FLOPS * numbers), float(read + 2 * written), False)


class _HostOptimizer:
    """The op of an optimizer on the host, such as `DeepSpeedCPUAdam` (deepspeed/ops/adam/cpu_adam.py)."""

    def __init__(self, operations: OperationLog) -> None:
        self._operations = operations

    def __getattr__(self, name: str) -> Callable[..., None]:
        if not name.startswith(("create_", "destroy_")) and not name.endswith(("_update", "_rollback")):
            raise AttributeError(name)
        return self._note if name.endswith("_update") else _does_nothing

    def _note(self, *arguments: Any) -> None:
        tensors = [each for each in arguments if isinstance(each, torch.Tensor)]
        parameter = tensors[0]
        moved = sum(each.numel() * each.element_size() * (1 if each is tensors[1] else 2) for each in tensors)
        self._operations.work("update", parameter, float(_ADAM_FLOPS * parameter.numel()), float(moved), True)


def _does_nothing(*arguments: Any) -> None: ...


_KERNELS = {
    "fused_adam": _FusedAdam,
    "cpu_adam": _HostOptimizer,
    "cpu_adagrad": _HostOptimizer,
    "cpu_lion": _HostOptimizer,
}


def install(operations: OperationLog) -> None:
    """Makes DeepSpeed's builders load stand-ins, so that nothing is compiled. Call it after DeepSpeed's import."""
    from deepspeed.ops.op_builder.builder import OpBuilder

    def load(builder: Any, verbose: bool = True) -> Any:
        """Replaces `OpBuilder.load`."""
        kernel = _KERNELS.get(builder.NAME)
        if kernel is None:
            raise CannotForeseeError(f"DeepSpeed's op {builder.NAME} has no stand-in under fake tensors.")
        return kernel(operations)

    OpBuilder.load = load
