"""Which kind of host this is."""

import os
from collections.abc import Mapping

from trial_lib.device.host.base import Host, HostKind
from trial_lib.device.host.cpu import CpuHost, cores_of_this_process
from trial_lib.device.host.cuda import CudaHost, gpus
from trial_lib.device.host.others import chooses_processor, refuse_others

_KINDS: tuple[HostKind, ...] = (CudaHost(), CpuHost())


def this_host(visible: str | None = None, variables: Mapping[str, str] | None = None) -> Host:
    """Returns what this process may use: CUDA_VISIBLE_DEVICES and the processor affinity are honoured.

    DS_ACCELERATOR=cpu has DeepSpeed train on the processor, so that is what there is to tune on then.

    Args:
        visible: a value of CUDA_VISIBLE_DEVICES in the place of the environment's; None for that.
        variables: the environment of who will use the devices; None for this process's.

    Raises:
        InputError: there are devices, and their driver does not answer, or they are of a kind that is not tuned on.
    """
    environment = os.environ if variables is None else variables
    if chooses_processor(environment):
        return cores_of_this_process()
    found = gpus(environment.get("CUDA_VISIBLE_DEVICES") if visible is None else visible, environment)
    if found is None:
        refuse_others(environment)
        return cores_of_this_process()
    return found


def kind_of(device: str) -> HostKind:
    """Returns what answers for the hosts of a kind, `cuda` or `cpu`."""
    return next(kind for kind in _KINDS if kind.device == device)


def kind_called(resource: str) -> HostKind:
    """Returns what answers for the hosts whose devices Ray calls that, `GPU` or `CPU`."""
    return next(kind for kind in _KINDS if kind.resource == resource)
