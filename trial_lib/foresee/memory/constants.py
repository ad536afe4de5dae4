"""Memory that no allocation of a program shows: workspaces, the CUDA context, the buffers of NCCL.

No constant here is fitted. Each has a source and a standard deviation that covers what its source leaves open.
"""

from math import hypot

from trial_lib.memory.budget import Uncertain

GIB = 2**30
MIB = 2**20

MEMORY_FIGURES = ("allocated", "reserved", "shown")
"""Figures of memory. `shown` is the one of `nvidia-smi`, which adds the context and NCCL to the reserved memory."""


CONTEXT = Uncertain(0.5 * GIB, 0.15 * GIB)
"""Driver, CUDA context and the kernels that were loaded, since CUDA 11.7 loads them when they are first used.

About 300 MB (github.com/pytorch/pytorch/issues/107667) to 400 MB (github.com/pytorch/pytorch/issues/109888). An H200
with CUDA 13.0 and driver 580 showed 527 MiB for the context and 92 MiB for the first kernel
(`benchmarks/results/gpu_h200_probe.json`).
"""

CONTEXT_OF_ALL_KERNELS = Uncertain(1.0 * GIB, 0.25 * GIB)
"""The same before CUDA 11.7, which loaded all kernels: over 1000 MB (github.com/pytorch/pytorch/issues/107667)."""

_NCCL_PAIR = Uncertain(0.53 * GIB, 0.25 * GIB)
_NCCL_NODE = Uncertain(0.67 * GIB, 0.3 * GIB)
_NCCL_NODES = Uncertain(1.0 * GIB, 0.45 * GIB)


def in_all(*parts: Uncertain) -> Uncertain:
    """Returns the sum of numbers whose errors are independent."""
    return Uncertain(sum(part.mean for part in parts), hypot(*(part.deviation for part in parts)))


def communication(world: int, ranks_per_node: int) -> Uncertain:
    """Returns the bytes of NCCL's buffers for one communicator over all ranks.

    Four A100 with NVLink showed 544 MB for a pair and 688 MB for more (github.com/NVIDIA/nccl/issues/964). Beyond two
    nodes the memory no longer grows (github.com/NVIDIA/nccl/issues/986). Several nodes are between that and the 1.6 GB
    of github.com/NVIDIA/nccl/issues/864. DeepSpeed opens a communicator for a single rank, too: 558 MiB on an H200
    (`benchmarks/results/gpu_h200_probe.json`).

    Args:
        world: ranks.
        ranks_per_node: ranks of one host.
    """
    if world > ranks_per_node:
        return _NCCL_NODES
    return _NCCL_PAIR if world <= 2 else _NCCL_NODE


def outside_pytorch(world: int, ranks_per_node: int, *, loads_all_kernels: bool = False) -> Uncertain:
    """Returns the bytes that `nvidia-smi` shows beyond the memory that PyTorch has reserved.

    Args:
        world: ranks.
        ranks_per_node: ranks of one host.
        loads_all_kernels: whether CUDA is older than 11.7.
    """
    context = CONTEXT_OF_ALL_KERNELS if loads_all_kernels else CONTEXT
    return in_all(context, communication(world, ranks_per_node))


def workspaces(capability: float = 8.0) -> tuple[int, ...]:
    """Returns the bytes of each workspace of cuBLAS, which PyTorch allocates as any tensor.

    One is of the thread of the forward pass, one of the thread of the backward pass. Source: `parseChosenWorkspaceSize`
    of `aten/src/ATen/cuda/CublasHandlePool.cpp`, in which the default is `:4096:2:16:8`, and 32 MiB from Hopper on.

    Args:
        capability: the compute capability of the device.
    """
    size = 32 * MIB if capability >= 9.0 else (2 * 4096 + 8 * 16) * 1024
    return size, size
