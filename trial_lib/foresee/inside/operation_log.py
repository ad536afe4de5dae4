"""The log of operations, in the order in which the program issues them, each with the module that issues it."""

from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from trial_lib.device.rank import tf32
from trial_lib.foresee.inside.operation_costs import cost_of
from trial_lib.wire.foreseen_run import OPERATIONS, Operation

INDEX = {name: index for index, name in enumerate(OPERATIONS)}
"""Index of each class of operations."""
# What matrix units do, with the question whether they may take 32-bit numbers for TF32 then.
_TF32 = {
    INDEX["matmul"]: tf32.allows_products,
    INDEX["attention"]: tf32.allows_products,
    INDEX["whole_attention"]: tf32.allows_products,
    INDEX["convolution"]: tf32.allows_convolutions,
}


class OperationLog:
    """Notes operations.

    Attributes:
        dtypes: names of number formats, by index. `tf32` stands for 32-bit numbers that are multiplied in it.
        modules: names of modules, by index.
        rows: what was noted: kind, dtype, FLOPs, bytes, ranks, module, on host.
    """

    def __init__(self) -> None:
        self.dtypes: list[str] = []
        self.modules: list[str] = [""]
        self.rows: list[tuple[int, int, float, float, int, int, int]] = []
        self._index: dict[int, int] = {}
        self._stack: list[int] = [0]

    def __len__(self) -> int:
        """Returns the number of operations so far."""
        return len(self.rows)

    def note(self, cost: tuple[int, int, float, float, int]) -> None:
        """Notes an operation of the device or the host, by its cost."""
        kind, dtype, flops, moved, on_host = cost
        if (allowed := _TF32.get(kind)) and self.dtypes[dtype] == "float32" and not on_host and allowed():
            dtype = self._index_of("tf32")
        self.rows.append((kind, dtype, flops, moved, 1, self._stack[-1], on_host))

    def cost(self, func: Any, args: Any, kwargs: Any, inputs: Any, made: Any, out: Any) -> Any:
        """Returns the cost of a call, as `cost_of` does."""
        return cost_of(func, args, kwargs, inputs, made, out, self.dtypes)

    def transfer(self, kind: str, tensor: torch.Tensor, moved: float, ranks: int) -> None:
        """Notes a transfer between ranks.

        Args:
            kind: its class.
            tensor: gives the number format.
            moved: bytes of the whole tensor on this rank.
            ranks: of the group.
        """
        self.rows.append((INDEX[kind], self.dtype(tensor), 0.0, float(moved), ranks, self._stack[-1], 0))

    def work(self, kind: str, tensor: torch.Tensor, flops: float, moved: float, on_host: bool) -> None:
        """Notes the work of a kernel that is not torch's."""
        self.rows.append((INDEX[kind], self.dtype(tensor), flops, moved, 1, self._stack[-1], int(on_host)))

    def moved_to_device(self, tensor: torch.Tensor) -> None:
        """Notes that a tensor of the host was moved to the device."""
        moved = float(tensor.numel() * tensor.element_size())
        self.rows.append((INDEX["to_device"], self.dtype(tensor), 0.0, moved, 1, self._stack[-1], 0))

    def swap(self, kind: str, tensor: torch.Tensor) -> None:
        """Notes that a tensor begins to be read from a disk, or written to it."""
        moved = float(tensor.numel() * tensor.element_size())
        self.rows.append((INDEX[kind], self.dtype(tensor), 0.0, moved, 1, self._stack[-1], 0))

    def swapped(self, kind: str) -> None:
        """Notes that the program waits for all that it began to read, or to write."""
        self.rows.append((INDEX[kind], 0, 0.0, 0.0, 1, self._stack[-1], 0))

    def dtype(self, tensor: torch.Tensor) -> int:
        """Returns the index of a tensor's number format."""
        return self._index_of(str(tensor.dtype).removeprefix("torch."))

    def _index_of(self, name: str) -> int:
        if name not in self.dtypes:
            self.dtypes.append(name)
        return self.dtypes.index(name)

    def multiplied_in(self) -> tuple[str, ...]:
        """Returns the number formats of all products of matrices so far, in order of their names."""
        return tuple(sorted({self.dtypes[row[1]] for row in self.rows if row[0] in _TF32}))

    def name_modules(self, module: nn.Module) -> None:
        """Gives the modules of a model their names from now on."""
        for name, each in module.named_modules():
            if id(each) not in self._index:
                self._index[id(each)] = len(self.modules)
                self.modules.append(name)

    def install(self) -> None:
        """Follows the calls of modules."""

        def before(module: nn.Module, inputs: Any) -> None:
            self._stack.append(self._index.get(id(module), self._stack[-1]))

        def after(module: nn.Module, inputs: Any, output: Any) -> None:
            if len(self._stack) > 1:
                self._stack.pop()

        torch_modules.register_module_forward_pre_hook(before)
        torch_modules.register_module_forward_hook(after, always_call=True)

    def record(self) -> tuple[Operation, ...]:
        """Returns the operations so far."""
        return tuple(Operation(*row) for row in self.rows)
