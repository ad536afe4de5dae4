"""Functions of a model whose work is invisible, because they launch kernels past torch's operators.

Triton kernels and pybind extensions do so. If such a kernel can be differentiated, it is in a
`torch.autograd.Function`. An operator of torch's allocates its memory, and no operator fills it.
"""

from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class OpaqueFunctions:
    """Records functions that return memory that no operator has written, while this is entered.

    Attributes:
        names: of those that were called.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        # Addresses of allocated memory that no operator has written to.
        self._unwritten: set[int] = set()

    def note(self, operator: Any, args: Any, output: Any) -> None:
        """Records the result of an operator."""
        if operator.is_view:
            return
        # A collective writes to its arguments. So may an operator of another library.
        written = output if operator.namespace == "aten" else (args, output)
        addresses = {address for each in tree_leaves(written) if (address := _address(each))}
        if operator.namespace == "aten" and operator._overloadpacket.__name__ in _EMPTY:
            self._unwritten |= addresses
        else:
            self._unwritten -= addresses

    def _noted(self, function: type, output: Any) -> Any:
        if any(_address(each) in self._unwritten for each in tree_leaves(output)):
            self.names.add(f"{function.__module__}.{function.__qualname__}")
        return output

    def __enter__(self) -> "OpaqueFunctions":
        """Starts noting."""
        self._apply = apply = torch.autograd.Function.__dict__["apply"]

        def noted(function: type, *args: Any, **kwargs: Any) -> Any:
            return self._noted(function, apply.__get__(None, function)(*args, **kwargs))

        torch.autograd.Function.apply = classmethod(noted)  # type: ignore[assignment, method-assign]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Restores torch."""
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        self._unwritten.clear()


def _address(value: Any) -> int:
    """The address of a tensor's data; 0 for anything else, and for a tensor without data of its own."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested or value.layout is not torch.strided:
        return 0
    return int(value.untyped_storage().data_ptr())
