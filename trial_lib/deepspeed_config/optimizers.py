"""Which optimizers DeepSpeed takes where: those that the configuration names, and those that the user's code makes.

Pure: standard library only. An optimizer is known by its class's module and name, such as `torch.optim.adamw.AdamW`;
empty where DeepSpeed makes it by the configuration.
"""

_DEEPSPEEDS_ON_CPU = frozenset(
    {
        "deepspeed.ops.adam.cpu_adam.DeepSpeedCPUAdam",
        "deepspeed.ops.adam.zenflow_cpu_adam.ZenFlowCPUAdam",
        "deepspeed.ops.adagrad.cpu_adagrad.DeepSpeedCPUAdagrad",
        "deepspeed.ops.lion.cpu_lion.DeepSpeedCPULion",
    }
)
# Their kernels are CUDA's.
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
# deepspeed/runtime/zero/utils.py ZERO_SUPPORTED_OPTIMIZERS: a class itself, not what derives from it.
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
# A number's update depends on that number and its gradient alone: ZeRO may cut tensors anywhere.
_ELEMENTWISE = frozenset({"adadelta", "adamax", "asgd", "nadam", "radam", "rmsprop", "rprop", "sgd"})


def untested_under_zero(config_type: str, code_class: str) -> str:
    """Returns the optimizer that ZeRO takes only with `zero_allow_untested_optimizer`; empty where it takes it so.

    Args:
        config_type: what the DeepSpeed configuration names, in lower case; empty where it names none.
        code_class: what the user's code makes, which DeepSpeed takes where there are both.
    """
    if code_class:
        return "" if code_class in _TESTED_UNDER_ZERO else code_class
    return "" if not config_type or config_type in _TYPES_TESTED_UNDER_ZERO else config_type


def is_elementwise(config_type: str, code_class: str) -> bool:
    """Returns whether an optimizer of PyTorch's does the same to a tensor's pieces as to the whole.

    Args: as for `untested_under_zero`.
    """
    if not code_class:
        return config_type in _ELEMENTWISE
    package, _, name = code_class.rpartition(".")
    return package.startswith("torch.optim.") and name.lower() in _ELEMENTWISE


def steps_where_it_is(code_class: str, device: str, is_offloaded: bool) -> bool:
    """Returns whether an optimizer of the code's can update parameters where they are.

    DeepSpeed's own for offload take those in a CPU's memory only (`deepspeed/ops/adam/cpu_adam.py` step), those with
    kernels of CUDA none there.

    Args:
        code_class: what the user's code makes.
        device: `cpu` or `cuda`.
        is_offloaded: whether DeepSpeed keeps the optimizer's part on the host.
    """
    if device != "cuda":
        return True
    return code_class not in (_ON_CUDA if is_offloaded else _DEEPSPEEDS_ON_CPU)
