"""The cost of an operation: its class, its FLOPs, and the bytes that it moves.

FLOPs come from torch's formulas (`torch.utils.flop_counter`), and are one for each element otherwise. Bytes are those
of the inputs that it reads and of the outputs that it writes, each once, as a fused kernel with perfect caches would.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import flop_registry

from trial_lib.foresee.inside import pretended_device
from trial_lib.wire.foreseen_run import OPERATIONS

_INDEX = {name: index for index, name in enumerate(OPERATIONS)}
# Parts of names, in the order in which they are tried, and words between underscores.
_PARTS = (
    ("attention", ("scaled_dot_product", "flash_attention", "efficient_attention")),
    ("convolution", ("convolution", "conv1d", "conv2d", "conv3d")),
    ("norm", ("layer_norm", "rms_norm", "batch_norm", "group_norm")),
    ("embedding", ("embedding",)),
    ("loss", ("nll_loss", "cross_entropy", "mse_loss", "log_softmax", "binary_cross")),
    ("update", ("fused_adam", "fused_sgd", "multi_tensor", "optimizer_update")),
)
_WORDS = (
    ("elementwise", {"clamp"}),
    (
        "matmul",
        {"mm", "addmm", "bmm", "baddbmm", "addbmm", "mv", "addmv", "matmul", "linear", "einsum", "dot", "gemm", "gemv"},
    ),
    (
        "reduction",
        {"sum", "mean", "norm", "amax", "amin", "max", "min", "softmax", "var", "std", "argmax", "any", "all", "topk"},
    ),
    ("copy", {"copy", "clone", "cat", "stack", "index", "gather", "scatter", "slice", "select", "pad", "contiguous"}),
)
# Neither reads nor writes anything.
_NO_WORK = (
    "empty",
    "new_empty",
    "empty_like",
    "empty_strided",
    "new_empty_strided",
    "resize_",
    "set_",
    "_assert_async",
)
# In place, but without a look at what was there.
_OVERWRITES = ("copy_", "zero_", "fill_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_")
# Values of `custom_mask_type` of the memory-efficient kernel: causal from the top left, or from the bottom right.
_CAUSAL_MASKS = (1, 2)


def class_of(name: str) -> int:
    """Returns the class of an operator of torch, as an index in `OPERATIONS`."""
    for kind, parts in _PARTS:
        if any(part in name for part in parts):
            return _INDEX[kind]
    words = set(name.split("_"))
    for kind, known in _WORDS:
        if words & known:
            return _INDEX[kind]
    return _INDEX["elementwise"]


def bytes_of(tensor: torch.Tensor) -> int:
    """Returns the bytes behind a tensor. An expanded one has fewer than its shape says."""
    size: int = tensor.element_size()
    for length, stride in zip(tensor.shape, tensor.stride(), strict=True):
        size *= length if stride else min(length, 1)
    return size


def cost_of(
    func: Any,
    args: Any,
    kwargs: Any,
    inputs: Sequence[torch.Tensor],
    made: Sequence[torch.Tensor],
    out: Any,
    dtypes: list[str],
) -> tuple[int, int, float, float, int] | None:
    """Returns kind, dtype, FLOPs, bytes and whether the host does it; None for an operator that moves nothing.

    Args:
        func: the operator.
        args: of the call.
        kwargs: of the call.
        inputs: all tensors among them.
        made: outputs with storages of their own.
        out: what it returned.
        dtypes: names of number formats, to which a new one is added.
    """
    name = func._opname
    if name in _NO_WORK:
        return None
    is_mutating = func._schema.is_mutable
    if not made and not is_mutating:
        return None
    kind = class_of(name)
    first = inputs[0] if inputs else made[0]
    is_on_device = any(each.device.type == pretended_device.NAME for each in (*inputs, *made))
    if name in ("_to_copy", "copy_") or name.startswith("_to_copy"):
        # What has no device but a shape stays where its inputs are.
        places = [each.device.type for each in (*inputs, *made) if each.device.type != "meta"]
        kinds = {place == pretended_device.NAME for place in places}
        if len(kinds) == 2:
            target = made[0] if made else inputs[0]
            to_device = target.device.type == pretended_device.NAME
            kind = _INDEX["to_device" if to_device else "to_host"]
            return kind, _dtype(first, dtypes), 0.0, float(bytes_of(target)), 0
    if name == "embedding":
        moved = 2.0 * bytes_of(made[0]) + bytes_of(inputs[1])
    else:
        moved = float(sum(map(bytes_of, inputs)) + sum(map(bytes_of, made)))
        if is_mutating and inputs and name not in _OVERWRITES and func._overloadname != "out":
            moved += bytes_of(inputs[0])
    formula = flop_registry.get(func._overloadpacket)
    if formula is not None:
        flops = float(formula(*args, **kwargs, out_val=out))
    else:
        flops = float(max((each.numel() for each in (*inputs, *made)), default=0))
    if name == "embedding":
        flops = 0.0
    if kind == _INDEX["attention"] and not _is_causal(func, args, kwargs):
        kind = _INDEX["whole_attention"]
    return kind, _dtype(first, dtypes), flops, moved, int(not is_on_device)


def _is_causal(func: Any, args: Any, kwargs: Any) -> bool:
    """Returns whether a kernel of attention leaves out what lies behind each position. One that is unknown does."""
    names = [argument.name for argument in func._schema.arguments]
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    if "custom_mask_type" in names:
        return given.get("custom_mask_type", 0) in _CAUSAL_MASKS
    return bool(given.get("is_causal", False)) or "is_causal" not in names


def _dtype(tensor: torch.Tensor, dtypes: list[str]) -> int:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in dtypes:
        dtypes.append(name)
    return dtypes.index(name)
