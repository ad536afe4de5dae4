"""Packages with kernels of their own in a foreseen run: Triton's kernels, those of Liger, and bitsandbytes.

* A Triton kernel computes nothing, and its launch is noted. The code around it is Python, and makes all outputs and
  temporaries by torch. So their sizes are the library's own, in whatever version is installed.
* Operators of bitsandbytes have fake implementations of their own. What they lack is added: FLOPs, the number of
  outliers, and memory that CUDA moves between device and host.
* A class of parameters of a library's own makes its objects by `Tensor._make_subclass`, which refuses a fake tensor. So
  a class is made that is both.
* Liger and bitsandbytes choose sizes and kernels by the word `cuda` (`if tensor.device.type == "cuda"`). Torch has no
  place to answer that. So the word is replaced in their code while it is loaded. Functions of torch take either.
"""

import functools
import math
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType
from typing import Any

import torch
from torch._library.fake_impl import FakeImplCtx
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.parameter import UninitializedParameter
from torch.utils.flop_counter import flop_registry

from trial_lib.messages.foreseen_run import CUDA_PACKAGES, OPERATIONS
from trial_lib.plan.simulate import known_numbers, pretended_device
from trial_lib.plan.simulate.asks import Asks
from trial_lib.plan.simulate.fake_tensors import FakeTensors
from trial_lib.plan.simulate.logs import OperationLog, bytes_of, class_of
from trial_lib.rank.patching import stand_in_for_scripts, when_imported

PRODUCTS = {
    "int8_linear_matmul": (0, 1),
    "int8_scaled_mm": (0, 1),
    "int8_mixed_scaled_mm": (0, 2),
    "gemm_4bit": (0, 2),
    "gemv_4bit": (0, 2),
}
"""Operators of bitsandbytes that multiply: positions of the samples and of the weights, or of the weights' shape."""

_WORD = "cuda"
# Modules of triton, and their classes that launch a kernel.
_LAUNCHERS = {"triton.runtime.jit": ("JITFunction",), "triton.runtime.autotuner": ("Autotuner", "Heuristics")}


def install(fake: FakeTensors, operations: OperationLog) -> None:
    """Follows the imports of the packages. Call it once, before the program runs."""
    note_launches(operations)
    make_own_parameters(fake)
    change_words()
    when_imported("bitsandbytes._ops", _add_to_operators)
    when_imported("bitsandbytes.optim.optimizer", _keep_states_on_the_device)


def note_launches(operations: OperationLog) -> None:
    """Replaces launches of Triton kernels."""

    def launch(kernel: Any, *args: Any, grid: Any = None, warmup: bool = False, **kwargs: Any) -> None:
        if not warmup:
            _note(operations, kernel, [*args, *kwargs.values()])

    def replace(module: ModuleType) -> None:
        for name in _LAUNCHERS[module.__name__]:
            launcher = getattr(module, name, None)
            if launcher is not None:
                launcher.run = launch

    for name in _LAUNCHERS:
        when_imported(name, replace)


def _note(operations: OperationLog, kernel: Any, arguments: list[Any]) -> None:
    """Notes a launch. The kernel reads or writes each of its tensors once, with one FLOP for each number.

    A kernel that goes through a tensor twice does more. Its source would have to be read for that.
    """
    tensors = {id(each): each for each in arguments if isinstance(each, torch.Tensor)}
    if not tensors:
        return
    for each in tensors.values():
        known_numbers.forget(each)
    largest = max(tensors.values(), key=bytes_of)
    moved = float(sum(map(bytes_of, tensors.values())))
    kind = OPERATIONS[class_of(_name(kernel))]
    on_host = largest.device.type != pretended_device.NAME
    operations.work(kind, largest, float(largest.numel()), moved, on_host)


def _name(kernel: Any) -> str:
    while hasattr(kernel, "fn"):
        kernel = kernel.fn
    return str(getattr(kernel, "__name__", ""))


def make_own_parameters(fake: FakeTensors) -> None:
    """Replaces `Tensor._make_subclass`."""
    original = torch.Tensor._make_subclass

    def make_subclass(cls: Any, data: torch.Tensor, require_grad: bool = False, **more: Any) -> torch.Tensor:
        is_own = issubclass(cls, torch.nn.Parameter) and cls is not torch.nn.Parameter
        if is_own and type(data) is torch.Tensor and data.device.type == "cpu":
            data = fake.parameter(data)
        if not isinstance(data, FakeTensor):
            real: torch.Tensor = original(cls, data, require_grad, **more)
            return real
        made = data.detach().requires_grad_(require_grad)
        made.__class__ = cls if issubclass(cls, FakeTensor) else _both(cls)
        return made

    torch.Tensor._make_subclass = staticmethod(make_subclass)  # type: ignore[method-assign, assignment]


@functools.cache
def _both(cls: type) -> type:
    return type(cls)(cls.__name__, (cls, FakeTensor), _WITHOUT_SHAPE if issubclass(cls, UninitializedParameter) else {})


# A lazy layer's parameter refuses to tell its shape, which the mode has to know. Later it becomes a usual parameter.
_WITHOUT_SHAPE = {"shape": torch.Tensor.shape, "cls_to_become": FakeTensor, "_is_param": True}


def change_words() -> None:
    """Changes the code of the packages while it is loaded."""
    # After the finder that calls back after an import, which asks the others.
    sys.meta_path.insert(sys.meta_path.index(PathFinder), _Finder())


def with_pretended_device(code: CodeType) -> CodeType:
    """Each constant `cuda` becomes the pretended device's name. A set of constants gets it besides."""
    return code.replace(co_consts=tuple(map(_replaced, code.co_consts)))


def _replaced(constant: Any) -> Any:
    if isinstance(constant, CodeType):
        return with_pretended_device(constant)
    if constant == _WORD and isinstance(constant, str):
        return pretended_device.NAME
    if isinstance(constant, frozenset) and _WORD in constant:
        return constant | {pretended_device.NAME}
    return tuple(map(_replaced, constant)) if type(constant) is tuple else constant


class _Finder(MetaPathFinder):
    """Finds modules of the packages as Python's own finder does, and changes their code."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname.partition(".")[0] not in CUDA_PACKAGES:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and type(spec.loader) is SourceFileLoader:
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType | None:
        code = super().get_code(fullname)
        return None if code is None else with_pretended_device(code)


def _add_to_operators(module: ModuleType) -> None:
    for name, places in PRODUCTS.items():
        packet = getattr(torch.ops.bitsandbytes, name, None)
        if packet is not None:
            flop_registry[packet] = flops_of(*places)
    original = FakeImplCtx.new_dynamic_size

    def new_dynamic_size(context: Any, **bounds: Any) -> Any:
        """Columns with an outlier, which are few."""
        if str(context._op).startswith("bitsandbytes"):
            return 0
        return original(context, **bounds)

    FakeImplCtx.new_dynamic_size = new_dynamic_size  # type: ignore[method-assign, assignment]


def flops_of(samples: int, weights: int) -> Any:
    """The formula of an operator for `torch.utils.flop_counter`, by the positions of its samples and weights."""

    def flops(*args: Any, **kwargs: Any) -> int:
        """The first number of the weights' shape is the outputs' length."""
        shape = args[weights].shape if isinstance(args[weights], torch.Tensor) else args[weights]
        return 2 * int(math.prod(args[samples].shape)) * int(shape[0])

    return flops


def _keep_states_on_the_device(module: ModuleType) -> None:
    optimizer_class: Any = module.Optimizer8bit

    def get_state_buffer(optimizer: Any, p: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """CUDA moves the pages of a paged optimizer to the host when the device is full. They are counted on the
        device.
        """
        return torch.zeros_like(p, dtype=dtype, device=p.device)

    optimizer_class.get_state_buffer = get_state_buffer


# Experts that a router chooses, in a foreseen run.

# The best of more are tokens of a vocabulary, or places in an image.
_MOST_EXPERTS = 2**10
# More choices are no routing. A softmax looks for the largest of as many rows.
_MOST_CHOICES = 2**20
# Functions of torch that choose the best along a dimension, and the place of that dimension among their arguments.
_CHOICES = {"topk": 2, "argmax": 1, "max": 1}


def install_chosen_experts(asks: Asks) -> None:
    """Replaces the functions. Call it once, before the program runs."""
    for name, place in _CHOICES.items():
        original = getattr(torch, name)
        stand_in_for_scripts(name, original, _choosing(original, name, place, asks))
        setattr(torch.Tensor, name, _choosing(getattr(torch.Tensor, name), name, place, asks))


def _choosing(original: Any, name: str, place: int, asks: Asks) -> Callable[..., Any]:
    """A function that chooses each equally often."""
    default = -1 if name == "topk" else None

    @functools.wraps(original)
    def choose(*args: Any, **kwargs: Any) -> Any:
        found = original(*args, **kwargs)
        chosen = found[1] if isinstance(found, tuple) else found
        if isinstance(chosen, FakeTensor) and not known_numbers.is_known(chosen) and args:
            dimension = kwargs.get("dim", kwargs.get("axis", args[place] if len(args) > place else default))
            if _may_route(args[0], chosen, dimension):
                note = asks.choice(name, args[0].shape[-1])
                if note is not None:
                    known_numbers.invent(chosen, _in_turn(chosen, args[0].shape[-1]), note)
        return found

    return choose


def _may_route(scores: torch.Tensor, chosen: torch.Tensor, dimension: Any) -> bool:
    if not isinstance(dimension, int) or scores.dim() <= 1 or dimension not in (-1, scores.dim() - 1):
        return False
    return scores.shape[-1] <= _MOST_EXPERTS and chosen.numel() <= _MOST_CHOICES


def _in_turn(chosen: torch.Tensor, among: int) -> torch.Tensor:
    # Choices of which each goes on after those of the token before it.
    return (torch.arange(chosen.numel(), dtype=chosen.dtype, device="cpu") % among).reshape(chosen.shape)
