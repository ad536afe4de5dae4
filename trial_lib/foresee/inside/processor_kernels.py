"""Memory that operators take on a processor beside their results, noted in the log of memory.

All of this was read from the calls of the C library on a CPU (PyTorch 2.13, oneDNN with AVX-512, gloo):

* Convolutions run in oneDNN, which computes in blocks of channels. It copies plain tensors into blocks and back, and
  each copy is as large as the tensor. Matrix products, attention and norms take nothing of that size.
* gloo gathers into a flat copy of the result, on the heap of its own thread, and PyTorch makes a second one on the
  program's heap. A scattered reduction copies its input. A reduction takes two segments on the heap of the thread.

On a GPU a kernel's workspace is part of the device's constants, so these blocks have places of their own.
"""

from collections.abc import Sequence
from typing import Any

import torch

from trial_lib.foresee.inside.memory_log import PROCESSOR, THREAD, MemoryLog

FORWARD, BACKWARD = "convolution", "convolution_backward"
# A first layer's kernels read an image as it is.
_IMAGE_CHANNELS = 3
_SEGMENTS = 2 * 2**20


def note_made(name: str, args: Sequence[Any], made: Sequence[torch.Tensor], memory: MemoryLog) -> None:
    """Notes the results of a convolution, with what a processor's kernel takes for a time beside them.

    Args:
        name: of the operator.
        args: of the call.
        made: its results with storages of their own, in order.
        memory: gets the events, in the order in which a CPU allocates and frees.
    """
    rest = list(made)
    if name == FORWARD and rest and _is_copied(rest[0]):
        with_copy = args[0].shape[1] > _IMAGE_CHANNELS
        _through_blocks(memory, args[0] if with_copy else None, rest.pop(0))
    elif name == BACKWARD and rest and _is_copied(args[0]):
        if rest[0].shape == args[1].shape:
            _through_blocks(memory, args[0], rest.pop(0))
        # The weights' gradient needs both tensors in blocks at once.
        copies = [memory.passing(_bytes(each), PROCESSOR) for each in (args[1], args[0])]
        for copy in reversed(copies):
            memory.passed(copy)
    for each in rest:
        memory.made(each)


def note_collective(kind: str, whole: int, memory: MemoryLog) -> None:
    """Notes what a collective of gloo takes for a time.

    Args:
        kind: of `OPERATIONS`.
        whole: bytes of its larger side.
        memory: gets the events.
    """
    blocks: list[tuple[int, int]] = []
    if kind == "all_gather":
        blocks = [(whole, PROCESSOR), (whole, THREAD)]
    elif kind == "reduce_scatter":
        blocks = [(whole, PROCESSOR), (min(whole, _SEGMENTS), THREAD)]
    elif kind == "all_reduce":
        blocks = [(min(whole, _SEGMENTS), THREAD)]
    numbers = [memory.passing(*block) for block in blocks]
    for number in reversed(numbers):
        memory.passed(number)


def _through_blocks(memory: MemoryLog, source: torch.Tensor | None, result: torch.Tensor) -> None:
    """Notes the copy of a source, the result in blocks, and the plain result."""
    copy = None if source is None else memory.passing(_bytes(source), PROCESSOR)
    blocked = memory.passing(_bytes(result), PROCESSOR)
    if copy is not None:
        memory.passed(copy)
    memory.made(result)
    memory.passed(blocked)


def _bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _is_copied(tensor: torch.Tensor) -> bool:
    """Returns whether a tensor is plain. With its channels last, kernels take it as it is."""
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    last = formats.get(tensor.dim())
    return last is None or not tensor.is_contiguous(memory_format=last) or tensor.is_contiguous()
