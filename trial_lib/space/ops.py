"""DeepSpeed's compiled operators, by the names of their builders, and the ones that a configuration needs.

Read from DeepSpeed 0.16 to 0.19.8. Pure: standard library only.
"""

from collections.abc import Mapping
from typing import Any

from trial_lib.space.knobs import get_knob
from trial_lib.space.known_knobs.offload import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM

SHARED_MEMORY = "ShareMemCommBuilder"
"""The operator of the collectives on a CPU."""

_ADAMS = ("adam", "adamw", "muon")
# deepspeed/runtime/engine.py _configure_basic_optimizer, by whether the optimizer is offloaded.
_OF_AN_OPTIMIZER = {
    **{name: {False: "FusedAdamBuilder", True: "CPUAdamBuilder"} for name in _ADAMS},
    "adagrad": {True: "CPUAdagradBuilder"},
    "lamb": {False: "FusedLambBuilder", True: "FusedLambBuilder"},
    "lion": {False: "FusedLionBuilder", True: "CPULionBuilder"},
}
# runtime/zero/partition_parameters.py CUDAQuantizer, runtime/comm/coalesced_collectives.py all_to_all_quant_reduce.
_QUANTIZED = (
    "zero_optimization.zero_quantized_weights",
    "zero_optimization.zero_quantized_nontrainable_weights",
    "zero_optimization.zero_quantized_gradients",
)
_OFFLOADED = ("cpu", "nvme")


def ops_of(config: Mapping[str, Any], *, code_has_optimizer: bool = False, unless_named: str = "") -> tuple[str, ...]:
    """Returns the operators that DeepSpeed loads for a configuration. Those that the code loads itself are not known.

    Args:
        config: a complete DeepSpeed configuration.
        code_has_optimizer: whether the code makes an optimizer. DeepSpeed uses it instead of one in the configuration.
        unless_named: the optimizer type to assume if the configuration names none.
    """
    ops = []
    named = "" if code_has_optimizer else get_knob(config, "optimizer.type", unless_named)
    by_offload = _OF_AN_OPTIMIZER.get(str(named or "").lower(), {})
    is_offloaded = get_knob(config, OFFLOAD_OPTIMIZER) in _OFFLOADED or _offloads_as_once(config)
    if is_offloaded in by_offload and get_knob(config, "optimizer.params.torch_adam") is not True:
        ops.append(by_offload[is_offloaded])
    if "nvme" in (get_knob(config, OFFLOAD_OPTIMIZER), get_knob(config, OFFLOAD_PARAM)):
        ops.append("AsyncIOBuilder")
    if any(get_knob(config, path) is True for path in _QUANTIZED):
        ops.append("QuantizerBuilder")
    return tuple(ops)


def _offloads_as_once(config: Mapping[str, Any]) -> bool:
    """Returns whether the optimizer is offloaded by DeepSpeed's first key for it, which still works."""
    return get_knob(config, "zero_optimization.cpu_offload") is True


def shown_op(builder: str) -> str:
    """Returns the usual name of an operator, such as `CPUAdam`."""
    return builder.removesuffix("Builder")
