"""The optimizers that DeepSpeed accepts: those of the configuration, and those that the user's code makes.

Pure: standard library only. An optimizer is named by the module and name of its class, such as
`torch.optim.adamw.AdamW`. The name is empty if DeepSpeed makes the optimizer by the configuration.
"""

from collections.abc import Mapping
from typing import Any

_CPU_ADAM = "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam"
_DEEPSPEEDS_ON_CPU = frozenset(
    {
        _CPU_ADAM,
        "deepspeed.ops.adam.zenflow_cpu_adam.ZenFlowCPUAdam",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    }
)
# These have CUDA kernels.
_ON_CUDA = frozenset(
    {
        "deepspeed.ops.adam.fused_adam.FusedAdam",
        "deepspeed.ops.lamb.fused_lamb.FusedLamb",
        "deepspeed.ops.lion.fused_lion.FusedLion",
        "apex.optimizers.fused_adam.FusedAdam",
        "apex.optimizers.fused_lamb.FusedLAMB",
        "apex.optimizers.fused_sgd.FusedSGD",
    }
)
# deepspeed/runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS. It compares classes, so subclasses do not count.
_TESTED_UNDER_ZERO = _DEEPSPEEDS_ON_CPU | {
    "torch.optim.adam.Adam",
    "torch.optim.adamw.AdamW",
    "torch.optim.adagrad.Adagrad",
    "deepspeed.ops.adam.fused_adam.FusedAdam",
    "deepspeed.ops.lion.fused_lion.FusedLion",
    "apex.optimizers.fused_adam.FusedAdam",
    "deepspeed.runtime.zero.muon.muon_optimizer.MuonWithAuxAdam",
}
_TYPES_TESTED_UNDER_ZERO = frozenset({"adam", "adamw", "adagrad", "lion", "muon"})
# The update of a number depends only on that number and its gradient, so ZeRO may cut tensors anywhere.
_ELEMENTWISE = frozenset({"adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"})


def untested_under_zero(config_type: str, code_class: str) -> str:
    """Returns the optimizer that ZeRO accepts only with `zero_allow_untested_optimizer`; empty if it needs none.

    Args:
        config_type: the type in the DeepSpeed configuration, in lower case; empty if there is none.
        code_class: the class that the user's code makes. DeepSpeed uses it if there are both.
    """
    if code_class:
        return "" if code_class in _TESTED_UNDER_ZERO else code_class
    return "" if not config_type or config_type in _TYPES_TESTED_UNDER_ZERO else config_type


def is_elementwise(config_type: str, code_class: str) -> bool:
    """Returns whether an optimizer of PyTorch's treats pieces of a tensor as it treats the whole.

    Args: as for `untested_under_zero`.
    """
    if not code_class:
        return config_type in _ELEMENTWISE
    package, _, name = code_class.rpartition(".")
    return package.startswith("torch.optim.") and name.lower() in _ELEMENTWISE


def is_deepspeeds_cpu_adam(config: Mapping[str, Any], code_class: str) -> bool:
    """Returns whether an offloaded optimizer is `DeepSpeedCPUAdam`.

    See `deepspeed/runtime/engine.py` `_configure_basic_optimizer`.

    Args:
        config: the DeepSpeed configuration.
        code_class: the class that the user's code makes. DeepSpeed uses it if there are both.
    """
    if code_class:
        return code_class == _CPU_ADAM
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or str(section.get("type", "")).lower() not in ("adam", "adamw"):
        return False
    params = section.get("params")
    return not (isinstance(params, Mapping) and params.get("torch_adam"))


def steps_where_it_is(code_class: str, device: str, is_offloaded: bool) -> bool:
    """Returns whether an optimizer of the user's code can update parameters in their memory.

    DeepSpeed's optimizers for offload update only in a CPU's memory (`deepspeed/ops/adam/cpu_adam.py` step). Those with
    CUDA kernels cannot update there.

    Args:
        code_class: the class that the user's code makes.
        device: `cpu` or `cuda`.
        is_offloaded: whether DeepSpeed keeps the optimizer's part on the host.
    """
    if device != "cuda":
        return True
    return code_class not in (_ON_CUDA if is_offloaded else _DEEPSPEEDS_ON_CPU)
