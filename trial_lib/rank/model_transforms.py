"""The blocks of a model that are worth recomputing, and the guard that they compute alike."""

import functools
import importlib.util
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.utils.checkpoint import checkpoint

from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE, TURNED
from zerotune.trial_lib.rank.loader_batches import tensors_in
from zerotune.trial_lib.rank.program_facts import ProgramFacts
from zerotune.trial_lib.rank.torch_functions import watch_recomputation

_FEWEST_BLOCKS = 2
_FEWEST_OPERATIONS = 2
_LISTS = (torch.nn.ModuleList, torch.nn.ModuleDict)
# Their backward pass reads the result, or nothing (torch/tools/autograd/derivatives.yaml).
_KEEP_THEIR_RESULT = (
    *(torch.nn.ReLU, torch.nn.Sigmoid, torch.nn.Tanh, torch.nn.Softmax, torch.nn.LogSoftmax),
    *(torch.nn.Identity, torch.nn.Flatten, torch.nn.Unflatten),
)


def repeated_blocks(model: Any) -> list[Any]:
    """The blocks of the model's lists, in their order, with all other modules of their classes.

    Of lists within each other, the outermost has the blocks: a layer, and not the experts within it. If the members of
    a list are stages, the blocks within them are meant. Blocks of a single operation are left out.
    """
    listed = list(_listed(model))
    kinds = {type(block) for block in listed if type(block) is not torch.nn.Sequential}
    found = _outermost(model, kinds, {id(block) for block in listed})
    # A block may be in two lists. Turned twice, it would be recomputed within its own recomputation.
    return list(dict.fromkeys(filter(_is_worth_it, found)))


def _listed(module: Any) -> Iterator[Any]:
    blocks = _blocks_of(module)
    if blocks and not _are_stages(blocks):
        yield from blocks
        return
    for child in module.children():
        yield from _listed(child)


def _blocks_of(module: Any) -> list[Any]:
    # None if it is neither a list nor a sequence, or if its classes do not repeat. Layers of two classes may take
    # turns, as in a mixture of experts. In a sequence these may be single operations.
    if not isinstance(module, (*_LISTS, torch.nn.Sequential)):
        return []
    # One block may be there several times. `children` has it once.
    children = [child for child in module._modules.values() if child is not None]
    classes = Counter(map(type, children))
    if not children or min(classes.values()) < _FEWEST_BLOCKS or any(isinstance(each, _LISTS) for each in children):
        return []
    are_worth_it = any(map(_is_worth_it, children)) if len(classes) == 1 else all(map(_is_worth_it, children))
    return children if are_worth_it and any(map(_size, children)) else []


def _are_stages(blocks: Sequence[Any]) -> bool:
    # As those of a Swin transformer: most of their parameters are in lists of blocks that normalise. Experts within a
    # layer do not.
    inner = [each for block in blocks for each in _listed(block)]
    normalise = any("norm" in type(module).__name__.lower() for each in inner for module in each.modules())
    return normalise and 2 * sum(map(_size, inner)) > sum(map(_size, blocks))


def _size(module: Any) -> int:
    # The elements of its parameters, which ZeRO-3 may have partitioned.
    return sum(int(getattr(each, "ds_numel", each.numel())) for each in module.parameters())


def _is_worth_it(block: Any) -> bool:
    return sum(map(_own_operations, block.modules())) >= _FEWEST_OPERATIONS


def _own_operations(module: Any) -> int:
    # Each matrix has one, as the two of a recurrent layer. Code that calls children has others, such as a sum.
    parameters = list(module.parameters(recurse=False))
    if parameters:
        return max(1, sum(len(getattr(each, "ds_shape", each.shape)) > 1 for each in parameters))
    if any(True for _ in module.children()):
        return int(not isinstance(module, (*_LISTS, torch.nn.Sequential)))
    return int(not isinstance(module, (*_LISTS, torch.nn.Sequential, *_KEEP_THEIR_RESULT)))


def _outermost(module: Any, kinds: Collection[type], blocks: Collection[int]) -> Iterator[Any]:
    for child in module.children():
        if type(child) in kinds or id(child) in blocks:
            yield child
        else:
            yield from _outermost(child, kinds, blocks)


# The guard: at its first call a block is computed with and without recomputation


class GuardedCheckpoint:
    """Recomputes a block, and compares its first outputs and gradients.

    A partitioned block is not in memory to compare.
    """

    def __init__(self) -> None:
        self._has_compared = False

    def __call__(self, block: Any, forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """The block's outputs. ValueError if the block is another one when it is recomputed."""
        # In this order: compiled code must not depend on what has been compared, or it would be compiled again.
        if not torch.compiler.is_compiling() and not self._has_compared and torch.is_grad_enabled():
            self._compare_once(block, forward, args, kwargs)
        return _recomputed(forward, *args, **kwargs)

    def _compare_once(
        self, block: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        is_real = not any(isinstance(each, FakeTensor) for each in tensors_in((args, kwargs)))
        if is_real:
            self._has_compared = True
            if not any(hasattr(parameter, "ds_id") for parameter in block.parameters()):
                _compare(block, forward, args, kwargs)


def _recomputed(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    # torch keeps the random numbers of the devices of positional inputs only (torch/utils/checkpoint.py
    # get_device_states), and takes some named inputs for its own. So all inputs are positional here.
    if not kwargs:
        return checkpoint(forward, *args, use_reentrant=False)
    by_name = functools.partial(_by_name, forward, tuple(kwargs))
    return checkpoint(by_name, *args, *kwargs.values(), use_reentrant=False)


def _by_name(forward: Callable[..., Any], names: tuple[str, ...], *inputs: Any) -> Any:
    # Calls a forward pass. The last inputs have names.
    first = len(inputs) - len(names)
    return forward(*inputs[:first], **dict(zip(names, inputs[first:], strict=True)))


def _compare(block: Any, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    buffers = [(buffer, buffer._version) for buffer in block.buffers()]
    parameters = [each for each in block.parameters() if each.requires_grad]
    recomputing = functools.partial(_recomputed, forward)
    plain, recomputed = (_computed(each, parameters, args, kwargs) for each in (forward, recomputing))
    name = type(block).__name__
    if any(buffer._version != version for buffer, version in buffers):
        raise ValueError(f"{name} changes its buffers in a forward pass, so it cannot be recomputed.")
    for ours, theirs in zip(plain, recomputed, strict=True):
        # Half of the digits have to agree.
        if (share := _apart(ours, theirs)) > math.sqrt(_roundoff(ours)):
            raise ValueError(f"{name} has other outputs or gradients if it is recomputed: {share:.1%} apart.")


def _apart(plain: list[torch.Tensor], recomputed: list[torch.Tensor]) -> float:
    # How far tensors are apart, all of them together, as a share of their norm. A GPU adds in another order at each
    # call (the backward pass of flash attention does). So elements near zero, and gradients that are zero but for
    # rounding, differ by any factor. Another dropout changes the norm by its own size.
    if [each.shape for each in plain] != [each.shape for each in recomputed]:
        return math.inf
    norm = functools.partial(torch.linalg.vector_norm, dtype=torch.float64)
    apart = sum(float(norm(ours - theirs)) ** 2 for ours, theirs in zip(plain, recomputed, strict=True))
    size = sum(float(norm(each)) ** 2 for each in plain)
    # Numbers that overflow tell nothing.
    return math.sqrt(apart / size) if math.isfinite(size) and size else 0.0


def _roundoff(tensors: list[torch.Tensor]) -> float:
    # The spacing of the numbers next to 1 in the narrowest format that they may have been computed in.
    formats = {each.dtype for each in tensors if each.is_floating_point()}
    for device in {each.device.type for each in tensors}:
        if torch.is_autocast_enabled(device):
            formats.add(torch.get_autocast_dtype(device))
    return max((torch.finfo(each).eps for each in formats), default=0.0)


def _computed(
    forward: Callable[..., Any], parameters: list[torch.Tensor], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    inputs = [_own(each) for each in args]
    named = {name: _own(each) for name, each in kwargs.items()}
    with torch.random.fork_rng():
        found = forward(*inputs, **named)
        outputs = [each for each in tensors_in(found) if each.requires_grad]
        given = [each for each in (*inputs, *named.values()) if isinstance(each, torch.Tensor)]
        wanted = [*(each for each in given if each.requires_grad), *parameters]
        if not outputs or not wanted:
            return [each.detach() for each in outputs], []
        sums = [each.sum() for each in outputs]
        gradients = torch.autograd.grad(sums, wanted, allow_unused=True)
    return [each.detach() for each in outputs], [each.detach() for each in gradients if each is not None]


def _own(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.detach().clone().requires_grad_(value.requires_grad)


# Switches that ZeroTune turns in the user's model around `deepspeed.initialize`.


# The attribute by which a wrapper has the model: torch.compile, PEFT's two layers, DDP, Lightning and users' own.
_INNER = ("_orig_mod", "base_model", "module", "model")
_MOST_WRAPPERS = 6


def inner_model(model: Any) -> Any:
    """The Hugging Face model within wrappers; without one, the given model."""
    found = model
    for _ in range(_MOST_WRAPPERS):
        if hasattr(type(found), "set_attn_implementation") or hasattr(type(found), "gradient_checkpointing_enable"):
            return found
        inner = next((part for name in _INNER if (part := vars(found).get("_modules", {}).get(name)) is not None), None)
        if inner is None:
            return model
        found = inner
    return model


@dataclass(frozen=True)
class Found:
    """The values that a switch can have in one program."""

    values: tuple[Any, ...] = ()  # the program's own first. Empty if ZeroTune cannot turn the switch.
    reason: str = ""  # why it cannot, in words that follow "has no effect: "

    @classmethod
    def of(cls, own: Any, values: tuple[Any, ...]) -> "Found":
        return cls((own, *(value for value in values if value != own)))


# Activation checkpointing of a model: none, of all its repeated blocks, or of every second one.

NONE, FULL, EVERY_SECOND = "none", "full", "every_second"
_BY_ITSELF = "your code recomputes activations by itself"
_NO_BLOCKS = "the model has no repeated blocks of several operations"
_STATISTICS = "the repeated blocks keep statistics of their batches, which recomputation counts twice"


def find_checkpointing(model: Any) -> Found:
    """The kinds of checkpointing that a model can have, its own first."""
    own = inner_model(model)
    if _has_method(own):
        flags = [bool(module.gradient_checkpointing) for module in _flagged(own)]
        mine = NONE if not any(flags) else FULL if all(flags) else EVERY_SECOND
        return Found.of(mine, (NONE, FULL, EVERY_SECOND))
    if hasattr(model, "activation_checkpoint_interval"):
        return Found(reason="a pipeline has its own activation_checkpoint_interval")
    if any(isinstance(module, CheckpointWrapper) or _is_recomputed(module) for module in model.modules()):
        return Found(reason=_BY_ITSELF)
    _, reason = _recomputable(model)
    return Found(reason=reason) if reason else Found.of(NONE, (NONE, FULL, EVERY_SECOND))


def turn_checkpointing(model: Any, kind: str) -> None:
    """Gives a model another kind of checkpointing before its engine exists. ValueError without worthwhile blocks."""
    own = inner_model(model)
    if not _has_method(own):
        blocks, reason = _recomputable(model)
        if not blocks:
            raise ValueError(f"Its activations cannot be recomputed: {reason}.")
        guarded = GuardedCheckpoint()
        for block in _of_kind(blocks, kind):
            # A copy of the model gets a copy of this, which calls the copied block.
            block.forward = functools.partial(guarded, block, block.forward)
    elif find_checkpointing(model).values[0] != kind:
        # The newer name (transformers 5) warns of the older one, and means the same.
        of_transformers_5 = hasattr(own, "activation_checkpointing_enable")
        name = "activation_checkpointing" if of_transformers_5 else "gradient_checkpointing"
        if kind == NONE:
            getattr(own, f"{name}_disable")()
            return
        getattr(own, f"{name}_enable")(**{f"{name}_kwargs": {"use_reentrant": False}})
        layers = [module for module in _flagged(own) if not any(_flagged(child) for child in module.children())]
        for layer in set(layers) - set(_of_kind(layers, kind)):
            layer.gradient_checkpointing = False


def _recomputable(model: Any) -> tuple[list[Any], str]:
    blocks = repeated_blocks(model)
    found = [block for block in blocks if all(getattr(each, "running_mean", None) is None for each in block.modules())]
    return found, "" if found else _STATISTICS if blocks else _NO_BLOCKS


def _of_kind(blocks: list[Any], kind: str) -> list[Any]:
    return {NONE: [], FULL: blocks, EVERY_SECOND: blocks[::2]}[kind]


def _is_recomputed(module: Any) -> bool:
    # Whether `turn_checkpointing` has given a module its forward pass.
    return isinstance(getattr(vars(module).get("forward"), "func", None), GuardedCheckpoint)


def _has_method(model: Any) -> bool:
    return bool(getattr(model, "supports_gradient_checkpointing", False)) and hasattr(
        model, "gradient_checkpointing_enable"
    )


def _flagged(model: Any) -> list[Any]:
    return [module for module in model.modules() if hasattr(module, "gradient_checkpointing")]


# The attention implementation of a Hugging Face model.

# The attribute of a model's class that says whether it can have an implementation. The older name is that of
# transformers before 4.53.
_SAYS = {"sdpa": ("_supports_sdpa",), "flash_attention_2": ("_supports_flash_attn", "_supports_flash_attn_2")}


def find_attention(model: Any) -> Found:
    """The implementations that a model can have, its own first."""
    model = inner_model(model)
    own = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if not isinstance(own, str):
        return Found(reason="the model is none of Hugging Face's")
    if not _can_change(model):
        return Found(reason=f"{type(model).__name__} chooses its attention when it is made")
    values = tuple(name for name in TURNED[ATTENTION].values if name == "eager" or _supports(model, name))
    return Found.of(own, values) if own in values else Found(reason=f"its attention is {own}, which ZeroTune leaves")


def turn_attention(model: Any, name: str) -> None:
    """Gives a model another implementation. ValueError if transformers refuses it, or keeps another one."""
    model = inner_model(model)
    if model.config._attn_implementation == name:
        return
    model.set_attn_implementation(name)
    if model.config._attn_implementation != name:
        raise ValueError(f"{type(model).__name__} keeps the attention {model.config._attn_implementation}.")


def _can_change(model: Any) -> bool:
    # Whether the layers ask for the implementation in each forward pass (transformers from 4.48 on).
    asks = getattr(model, "_can_set_attn_implementation", None)
    return hasattr(model, "set_attn_implementation") and (asks is None or bool(asks()))


def _supports(model: Any, name: str) -> bool:
    if not any(getattr(model, says, False) for says in _SAYS[name]):
        return False
    if name != "flash_attention_2":
        return True
    from deepspeed.accelerator import get_accelerator

    # Its kernels are for GPUs alone, and transformers refuses them elsewhere.
    return bool(get_accelerator().device_name() == "cuda") and importlib.util.find_spec("flash_attn") is not None


# `torch.compile` of a model, by `engine.compile()`.

_COMPILERS = ("g++", "clang++")


def find_compiled(model: Any) -> Found:
    if hasattr(model, "activation_checkpoint_interval"):
        return Found(reason="the engine of a pipeline is not compiled")
    if hasattr(model, "_orig_mod") or any(_is_compiled(module) for module in model.modules()):
        return Found(reason="your code compiles its model by itself")
    if missing := _missing():
        return Found(reason=f"torch.compile needs {missing}")
    return Found.of(False, (False, True))


def _is_compiled(module: Any) -> bool:
    return getattr(module, "_compiled_call_impl", None) is not None or hasattr(module, "_orig_mod")


def _missing() -> str:
    # The compiler that inductor would not find; empty if there is one. A foreseen run compiles nothing, and its device
    # has the compilers of another host.
    from deepspeed.accelerator import get_accelerator

    device = get_accelerator().device_name()
    if device not in ("cpu", "cuda"):
        return ""
    if device == "cpu":
        found = any(map(shutil.which, (os.environ.get("CXX", _COMPILERS[0]), *_COMPILERS)))
        return "" if found else "a C++ compiler such as g++"
    return "" if importlib.util.find_spec("triton") is not None else "triton"


# All switches of a candidate


@dataclass(frozen=True)
class _Way:
    """How a switch is found and turned."""

    # Returns the values that a model can have, the program's own first, or the reason why it has none
    find: Callable[[Any], Found]
    # Turns it in a model, before the engine exists. None for a switch that an engine has.
    before: Callable[[Any, Any], None] | None = None
    after: Callable[[Any, Any], None] | None = None  # turns it in an engine. None for a switch that a model has.


# In this order: blocks are wrapped before the whole is compiled.
_WAYS: dict[str, _Way] = {
    ATTENTION: _Way(find_attention, before=turn_attention),
    CHECKPOINTING: _Way(find_checkpointing, before=turn_checkpointing),
    # The first step of the engine then pays for it.
    COMPILE: _Way(find_compiled, after=lambda engine, is_on: engine.compile() if is_on else None),
}


class ModelTransforms:
    """The switches of one candidate, the others staying as in the program. `facts` record those of its first engine."""

    def __init__(self, wanted: Mapping[str, Any] | None, facts: ProgramFacts | None = None) -> None:
        self._wanted = dict(wanted or {})
        self._facts = facts

    def before(self, arguments: dict[str, Any]) -> None:
        model = arguments.get("model")
        if model is None:
            return
        facts = self._facts
        if facts is not None and not _WAYS.keys() & (facts.found.turnable.keys() | facts.found.not_turnable.keys()):
            if not self._wanted:
                watch_recomputation()
            for place, way in _WAYS.items():
                found = way.find(model)
                if found.values:
                    facts.found.turnable[place] = list(found.values)
                else:
                    facts.found.not_turnable[place] = found.reason
        for place, way in _WAYS.items():
            if place in self._wanted and way.before is not None:
                way.before(model, self._wanted[place])

    def after(self, engine: Any) -> None:
        for place, way in _WAYS.items():
            if place in self._wanted and way.after is not None:
                way.after(engine, self._wanted[place])
