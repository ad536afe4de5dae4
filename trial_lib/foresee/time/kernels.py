"""Seconds of an operation on a device or its host: the slower of arithmetic and memory. Pure."""

from trial_lib.foresee.time.devices import Cluster, DeviceFigures
from trial_lib.foresee.time.efficiencies import Efficiencies
from trial_lib.wire.foreseen_run import OPERATIONS, Operation

ON_MATRIX_UNITS = ("matmul", "convolution", "attention", "whole_attention")
"""The names in `OPERATIONS` of what counts by its FLOPs as well as by its bytes."""
# A causal kernel computes half of the pairs of positions, and all count as FLOPs of the model (PaLM, appendix B). So it
# seems to be twice as fast as a kernel that computes all of them.
_SHARES = {"whole_attention": 0.5}
# No kernel is shorter: its blocks have to start and to end.
_SHORTEST = 3e-6


def kernel_seconds(operation: Operation, dtype: str, device: DeviceFigures, efficiencies: Efficiencies) -> float:
    """Returns the seconds that an operation keeps a device busy.

    Args:
        operation: one of a class that the device does itself.
        dtype: in which it multiplies, or of its inputs.
        device: the figures.
        efficiencies: the shares of the figures.
    """
    moving = operation.moved / (device.bandwidth * efficiencies.memory.value)
    kind = OPERATIONS[operation.kind]
    if kind not in ON_MATRIX_UNITS:
        return max(_SHORTEST, moving)
    share = _SHARES.get(kind, 1.0) * (efficiencies.attention if "attention" in kind else efficiencies.matmul).value
    return _SHORTEST + max(moving, operation.flops / (device.peak(dtype) * device.attained * share))


def host_seconds(operation: Operation, cluster: Cluster, efficiencies: Efficiencies) -> float:
    """Returns the seconds of an operation of the host's processor, such as DeepSpeed's CPU Adam.

    The host's memory bounds it: an update of Adam reads and writes 28 bytes for ten operations. A rank has its device's
    share of the host, as it has of the host's memory, whether the other devices train or not.
    """
    return operation.moved / (cluster.device.host_bandwidth * efficiencies.host_update.value)
