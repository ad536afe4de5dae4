"""Functions of a model whose work nobody sees: kernels that are launched past torch's operators.

Triton kernels and extensions by pybind are: what such a kernel is to differentiate stands in a
`torch.autograd.Function`, which takes memory by an operator of torch's and returns it filled by none.
"""

from types import TracebackType
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

_EMPTY = ("empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided")


class OpaqueFunctions:
    """Notes the functions that return what no operator has written, while it is entered.

    Attributes:
        names: of those that were called.
    """

    def __init__(self) -> None:
        self.names: set[str] = set()
        # Addresses of memory that was taken, and that no operator has written to.
        self._unwritten: set[int] = set()

    def note(self, operator: Any, args: Any, output: Any) -> None:
        """Notes what an operator has made."""
        if operator.is_view:
            return
        # A collective writes to what it is given, and so may an operator of somebody else's.
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
        """Leaves torch as it was."""
        torch.autograd.Function.apply = self._apply  # type: ignore[method-assign]
        self._unwritten.clear()


def _address(value: Any) -> int:
    """Returns where a tensor's numbers are; 0 for anything else, and for a tensor that holds none itself."""
    if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_nested or value.layout is not torch.strided:
        return 0
    return int(value.untyped_storage().data_ptr())
