"""The kind of this host."""

import os
from collections.abc import Mapping

from zerotune.trial_lib.device.base import Host, HostKind
from zerotune.trial_lib.device.cpu import CpuHost, chooses_processor, cores_of_this_process, refuse_others
from zerotune.trial_lib.device.cuda import CudaHost, gpus

_KINDS: tuple[HostKind, ...] = (CudaHost(), CpuHost())


def this_host(visible: str | None = None, variables: Mapping[str, str] | None = None) -> Host:
    """Returns the devices that this process may use. CUDA_VISIBLE_DEVICES and the processor affinity are honoured.

    With DS_ACCELERATOR=cpu DeepSpeed trains on the processor, so ZeroTune tunes on it. `visible` replaces the
    environment's CUDA_VISIBLE_DEVICES. `variables` are those of the process that will use the devices.

    Raises:
        InputError: there are devices, but their driver does not answer, or ZeroTune does not tune on their kind.
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
    """Returns the kind of host for `cuda` or `cpu`."""
    return next(kind for kind in _KINDS if kind.device == device)


def kind_called(resource: str) -> HostKind:
    """Returns the kind of host for Ray's `GPU` or `CPU`."""
    return next(kind for kind in _KINDS if kind.resource == resource)
