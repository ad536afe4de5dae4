"""The rules of DeepSpeed: settings that it refuses, and settings that it ignores. A sentence explains each rule.

Every rule has a test that saw DeepSpeed behave so. A candidate that breaks a rule is not run. It could only fail, or
measure the same as another.
"""

import contextlib
import difflib
import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from zerotune.trial_lib.deepspeed_config.layout import (
    Layout,
    ModelShape,
    empty_stages,
    undivided_devices,
    undivided_experts,
    undivided_heads,
    unshared_heads,
    unshared_tokens,
)
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    resolve_batch,
    short_name,
)
from zerotune.trial_lib.messages.errors import InputError

_INFO = Path("/proc/cpuinfo")
# oneDNN's avx512_core_fp16, the two parts of its avx2_vnni_2, and half precision on Arm.
_FP16 = ({"avx512_fp16"}, {"avx_ne_convert", "avx_vnni_int8"}, {"asimdhp"})


@functools.cache
def processor_computes_fp16() -> bool:
    """Returns whether DeepSpeed takes fp16 on this host's processor (deepspeed/accelerator/cpu_accelerator.py)."""
    words: set[str] = set()
    with contextlib.suppress(OSError):
        words = set(_INFO.read_text(errors="replace").split())
    return any(flags <= words for flags in _FP16)


# The optimizers that DeepSpeed accepts: those of the configuration, and those that the user's code makes.

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
    """Returns the optimizer that ZeRO accepts only with `zero_allow_untested_optimizer`; empty if it needs none. The
    configuration's type is in lower case, and empty if there is none. DeepSpeed uses the code's class if there are
    both.
    """
    if code_class:
        return "" if code_class in _TESTED_UNDER_ZERO else code_class
    return "" if not config_type or config_type in _TYPES_TESTED_UNDER_ZERO else config_type


def is_elementwise(config_type: str, code_class: str) -> bool:
    """Returns whether an optimizer of PyTorch's treats pieces of a tensor as it treats the whole."""
    if not code_class:
        return config_type in _ELEMENTWISE
    package, _, name = code_class.rpartition(".")
    return package.startswith("torch.optim.") and name.lower() in _ELEMENTWISE


def is_deepspeeds_cpu_adam(config: Mapping[str, Any], code_class: str) -> bool:
    """Returns whether an offloaded optimizer is `DeepSpeedCPUAdam` (`deepspeed/runtime/engine.py`
    `_configure_basic_optimizer`). DeepSpeed uses the code's class if there are both.
    """
    if code_class:
        return code_class == _CPU_ADAM
    section = config.get("optimizer")
    if not isinstance(section, Mapping) or str(section.get("type", "")).lower() not in ("adam", "adamw"):
        return False
    params = section.get("params")
    return not (isinstance(params, Mapping) and params.get("torch_adam"))


def steps_where_it_is(code_class: str, device: str, is_offloaded: bool) -> bool:
    """Returns whether an optimizer of the user's code can update parameters in their memory. DeepSpeed's optimizers for
    offload update only in a CPU's memory (`deepspeed/ops/adam/cpu_adam.py` step). Those with CUDA kernels cannot update
    there.
    """
    if device != "cuda":
        return True
    return code_class not in (_ON_CUDA if is_offloaded else _DEEPSPEEDS_ON_CPU)


DeviceName = Literal["cpu", "cuda"]
_UNKNOWN_SHAPE = ModelShape()


@dataclass(frozen=True)
class Rule:
    name: str  # for tests and records
    reason: str  # one sentence for the user. `{}` stands for the finding.
    finds: Callable[["Setting"], object]  # returns the finding in a configuration, or anything falsy
    # `refused` if an error ends the trial; `ignored` if the trial runs without the setting; `uneven` if it runs, and
    # its ranks have unequal shares
    effect: Literal["refused", "ignored", "uneven"] = "refused"


def broken_rules(
    ds_config: Mapping[str, Any],
    device: DeviceName,
    pipeline_parallel: bool | None,
    data_parallel_size: int | None,
    code_optimizer: str = "",
    *,
    slots: int | None = None,
    shape: ModelShape = _UNKNOWN_SHAPE,
) -> list[Rule]:
    """Returns the rules that a complete DeepSpeed configuration breaks, with the finding in each one's reason. The
    configuration may have the sections of switches and of layouts. None stands for what is not known yet. The code's
    optimizer is a class as in `optimizers`; empty if it makes none, or if that is not known.

    Example:
        >>> [rule.name for rule in broken_rules({"zero_optimization": {"stage": 2}}, "cuda", True, 2)]
        ['pipeline_with_zero_2_or_3']
    """
    setting = Setting(ds_config, device, pipeline_parallel, data_parallel_size, code_optimizer, slots, shape)
    found = ((rule, rule.finds(setting)) for rule in RULES)
    return [replace(rule, reason=rule.reason.format(what)) for rule, what in found if what]


@dataclass(frozen=True)
class Setting:
    """A DeepSpeed configuration and its place, as the rules read it. Values that DeepSpeed reads as its default
    ("auto", a section that is no mapping) read so here.
    """

    config: Mapping[str, Any]
    device: DeviceName
    pipeline: bool | None
    replicas: int | None
    code_optimizer: str = ""
    slots: int | None = None
    shape: ModelShape = _UNKNOWN_SHAPE

    @cached_property
    def layout(self) -> Layout:
        return Layout.of(self.config)

    def section(self, key: str) -> Mapping[str, Any]:
        section = self.config.get(key)
        return section if isinstance(section, Mapping) else {}

    def on(self, section: str, key: str = "enabled") -> bool:
        return self.section(section).get(key) is True

    @property
    def zero(self) -> Mapping[str, Any]:
        """The ZeRO section. `true` is DeepSpeed's old spelling of stage 1."""
        return {"stage": 1} if self.config.get("zero_optimization") is True else self.section("zero_optimization")

    @property
    def stage(self) -> int:
        """The ZeRO stage; 0 if there is none, -1 if it is no number."""
        stage = self.zero.get("stage", 0)
        return int(stage) if str(stage) in ("0", "1", "2", "3") else 0 if stage == "auto" else -1

    def offload(self, what: str) -> Mapping[str, Any]:
        section = self.zero.get(what)
        return section if isinstance(section, Mapping) and section.get("device") in ("cpu", "nvme") else {}

    @property
    def optimizer(self) -> str:
        """The optimizer's type, in lower case; empty if the user's code makes one."""
        return str(self.section("optimizer").get("type", "")).lower()

    @property
    def dtype(self) -> str:
        return "fp16" if self.on("fp16") else "bf16" if self.on("bf16") else "fp32"


# DeepSpeed 0.19.8. An unknown key may be a newer DeepSpeed's, so only one that looks like a slip is reported.
ZERO_KEYS = frozenset(
    """
    allgather_bucket_size allgather_partitions allgather_sequential compute_grad_norm contiguous_gradients cpu_offload
    cpu_offload_param cpu_offload_use_pin_memory elastic_checkpoint enable_sanity_checks
    gather_16bit_weights_on_model_save ignore_unused_parameters leaf_module legacy_stage1 load_from_fp32_weights
    log_trace_cache_warnings max_live_parameters max_reuse_distance memory_efficient_linear model_persistence_threshold
    module_granularity_threshold offload_optimizer offload_param overlap_comm override_module_apply
    param_persistence_threshold parameter_alignment pipeline_loading_checkpoint prefetch_bucket_size reduce_bucket_size
    reduce_scatter round_robin_gradients save_muon_momentum_buffer_in_memory stage stage3_allgather_sequential
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save stage3_max_live_parameters
    stage3_max_reuse_distance stage3_model_persistence_threshold stage3_module_granularity_threshold
    stage3_param_persistence_threshold stage3_prefetch_bucket_size stage3_use_all_reduce_for_fetch_params sub_group_size
    use_all_reduce_for_fetch_params use_multi_rank_bucket_allreduce zenflow zero_hpz_partition_size
    zero_quantized_gradients zero_quantized_nontrainable_weights zero_quantized_weights
    """.split()  # noqa: SIM905 a list of 54 lines says no more
)

_QUANTIZED_WEIGHTS = ("zero_quantized_weights", "zero_quantized_nontrainable_weights")


def _misspelt_zero_key(setting: Setting) -> str | None:
    for key in setting.zero.keys() - ZERO_KEYS:
        nearest = difflib.get_close_matches(key, ZERO_KEYS, n=1, cutoff=0.8)
        if nearest:
            return f"{key}; {nearest[0]} may be meant"
    return None


def _auto_batch(setting: Setting) -> str | None:
    return next((key for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION) if setting.config.get(key) == "auto"), None)


def _contradicting_batch(setting: Setting) -> str | None:
    if _auto_batch(setting):
        return None
    config = setting.config
    if setting.replicas is None:  # some number of replicas has to fit
        train, micro, steps = config.get(TRAIN_BATCH), config.get(MICRO_BATCH), config.get(ACCUMULATION, 1)
        if not (isinstance(train, int) and isinstance(micro, int) and isinstance(steps, int)):
            return None
        fits = train % (micro * steps or 1) == 0
        return None if fits else f"{TRAIN_BATCH}({train}) is no multiple of micro({micro}) * accumulation({steps})."
    try:
        resolve_batch(config, setting.replicas)
    except InputError as error:
        return error.what
    return None


def _partial_ratio(setting: Setting) -> str | None:
    ratio = setting.offload("offload_optimizer").get("ratio", 1.0)
    return str(ratio) if isinstance(ratio, (int, float)) and ratio < 1.0 else None


def _accumulation_dtype_at_stage_0(setting: Setting) -> str | None:
    dtype = setting.section("data_types").get("grad_accum_dtype")
    is_own = dtype is None or short_name(dtype) == setting.dtype
    return f"{dtype}, not {setting.dtype}" if setting.stage == 0 and not is_own else None


def _scaled_gradients(setting: Setting) -> str | None:
    if setting.stage < 2 or setting.zero.get("reduce_scatter") is False:
        return None
    if setting.config.get("prescale_gradients") is True:
        return "prescale_gradients"
    return "gradient_predivide_factor" if setting.config.get("gradient_predivide_factor", 1.0) != 1.0 else None


def _nvme_without_path(setting: Setting) -> str | None:
    if setting.stage != 3:
        return None
    offloads = ("offload_param", "offload_optimizer")
    sections = {what: setting.offload(what) for what in offloads}
    return next((w for w, s in sections.items() if s.get("device") == "nvme" and not s.get("nvme_path")), None)


def _compute_grad_norm_off(setting: Setting) -> str | None:
    if setting.zero.get("compute_grad_norm") is not False:
        return None
    if setting.stage not in (1, 2):
        return f"stage {setting.stage}"
    return "optimizer offload" if setting.offload("offload_optimizer") else None


def _half_master_weights(setting: Setting) -> str | None:
    keys = {"fp16": "fp16_master_weights_and_grads", "bf16": "bf16_master_weights_and_grads"}
    return next((key for section, key in keys.items() if setting.on(section, key)), None)


def _half_master_weights_on_device(setting: Setting) -> str | None:
    if setting.stage < 1 or setting.offload("offload_optimizer"):
        return None
    key = _half_master_weights(setting)
    return None if key is not None and key.startswith("bf16") and setting.on("bf16", "bf16_optimizer_states") else key


def _odd_allgather_bucket(setting: Setting) -> int | None:
    elements = setting.zero.get("allgather_bucket_size")
    return elements if setting.stage in (1, 2) and isinstance(elements, int) and elements % 2 else None


def _undivided_secondary_partition(setting: Setting) -> str | None:
    # deepspeed/utils/groups.py _create_zero_param_parallel_group: over all ranks, whatever the model's groups are.
    size = setting.zero.get("zero_hpz_partition_size", 1)
    if setting.stage != 3 or not setting.slots or not isinstance(size, int) or size < 2:
        return None
    return f"{setting.slots} ranks into groups of {size}" if setting.slots % min(size, setting.slots) else None


def _zero_plus_plus_below_stage_3(setting: Setting) -> str | None:
    if setting.stage not in (0, 1, 2):
        return None
    if setting.zero.get("zero_hpz_partition_size", 1) not in (0, 1, "auto"):
        return "zero_hpz_partition_size"
    switches = (*_QUANTIZED_WEIGHTS, "zero_quantized_gradients")
    return next((key for key in switches if setting.zero.get(key) is True), None)


RULES = (
    Rule(
        "pipeline_with_zero_2_or_3",
        "Pipeline parallelism works with ZeRO stages 0 and 1, not with stage {}.",
        lambda s: (s.pipeline or s.layout.pipeline > 1) and s.stage >= 2 and s.stage,
    ),
    Rule("unknown_stage", "ZeRO has the stages 0 to 3, not {}.", lambda s: s.stage == -1 and repr(s.zero["stage"])),
    Rule("misspelt_zero_key", "zero_optimization has no key {}.", _misspelt_zero_key),
    Rule("auto_batch", '{} is still "auto": DeepSpeed itself needs a number.', _auto_batch),
    Rule("contradicting_batch", "The batch does not add up: {}", _contradicting_batch),
    Rule("fp16_and_bf16", "fp16 and bf16 cannot both be enabled.", lambda s: s.on("fp16") and s.on("bf16")),
    Rule(
        "fp16_on_cpu",
        "fp16 is not supported on this CPU; bf16 is.",
        lambda s: s.device == "cpu" and s.on("fp16") and not processor_computes_fp16(),
    ),
    Rule(
        "half_master_weights_at_stage_0",
        "{} needs ZeRO stage 1, 2 or 3.",
        lambda s: s.stage == 0 and _half_master_weights(s),
    ),
    Rule(
        "half_master_weights_without_offload", "{} needs the optimizer to be offloaded.", _half_master_weights_on_device
    ),
    Rule(
        "accumulation_dtype_at_stage_0",
        "Without ZeRO, gradients accumulate in the model's own type: grad_accum_dtype is {}.",
        _accumulation_dtype_at_stage_0,
    ),
    Rule(
        "lamb_on_cpu",
        "The Lamb optimizer is not implemented on a CPU.",
        lambda s: s.device == "cpu" and s.optimizer == "lamb",
    ),
    Rule(
        "untested_optimizer_under_zero",
        'ZeRO takes the optimizer {} only with "zero_allow_untested_optimizer": true.',
        lambda s: (
            s.stage >= 1
            and s.config.get("zero_allow_untested_optimizer") is not True
            and untested_under_zero(s.optimizer, s.code_optimizer)
        ),
    ),
    Rule(
        "quantized_weights_on_cpu",
        "{} is not implemented on a CPU.",
        lambda s: (
            s.device == "cpu"
            and s.stage == 3
            and next((key for key in _QUANTIZED_WEIGHTS if s.zero.get(key) is True), None)
        ),
    ),
    Rule(
        "quantized_weights_under_autocast",
        "{} does not work under torch_autocast.",
        lambda s: s.on("torch_autocast") and s.zero.get("zero_quantized_weights") is True and "zero_quantized_weights",
    ),
    Rule(
        "quantized_gradients_without_reduce_scatter",
        "zero_quantized_gradients needs reduce_scatter.",
        lambda s: (
            s.stage == 3 and s.zero.get("zero_quantized_gradients") is True and s.zero.get("reduce_scatter") is False
        ),
    ),
    Rule(
        "muon_with_reduce_scatter",
        'At ZeRO stage 3 the Muon optimizer needs "reduce_scatter": false.',
        lambda s: s.stage == 3 and s.optimizer == "muon" and s.zero.get("reduce_scatter") is not False,
    ),
    Rule("odd_allgather_bucket", "allgather_bucket_size has to be even, not {}.", _odd_allgather_bucket),
    Rule(
        "partial_offload_below_stage_3",
        "Offloading a part of the optimizer (ratio {}) needs ZeRO stage 3.",
        lambda s: s.stage in (0, 1, 2) and _partial_ratio(s),
    ),
    Rule("nvme_without_path", "{} to NVMe needs an nvme_path.", _nvme_without_path),
    Rule(
        "summed_gradients_at_stage_3",
        "gradient_allreduce_op {} does not work with ZeRO stage 3.",
        lambda s: s.stage == 3 and s.config.get("gradient_allreduce_op") == "sum" and "sum",
    ),
    Rule(
        "scaled_gradients_with_reduce_scatter",
        "{} does not work with reduce_scatter at ZeRO stages 2 and 3.",
        _scaled_gradients,
    ),
    Rule(
        "compute_grad_norm_off",
        "compute_grad_norm can be off at ZeRO stages 1 and 2 without offload, not with {}.",
        _compute_grad_norm_off,
    ),
    Rule(
        "autotuning_enabled",
        "With autotuning enabled DeepSpeed ends the process after a few steps.",
        lambda s: s.on("autotuning"),
    ),
    Rule(
        "offload_param_below_stage_3",
        "Parameters are offloaded at ZeRO stage 3 only, not at {}.",
        lambda s: s.stage in (0, 1, 2) and s.offload("offload_param") and f"stage {s.stage}",
        "ignored",
    ),
    Rule(
        "offload_optimizer_at_stage_0",
        "The optimizer is offloaded at ZeRO stages 1 to 3, not at stage 0.",
        lambda s: s.stage == 0 and s.offload("offload_optimizer"),
        "ignored",
    ),
    Rule(
        "nvme_below_stage_3",
        "Below ZeRO stage 3 the optimizer is offloaded to CPU memory, not to NVMe.",
        lambda s: s.stage in (1, 2) and s.offload("offload_optimizer").get("device") == "nvme",
        "ignored",
    ),
    Rule(
        "zero_plus_plus_below_stage_3",
        "{} has an effect at ZeRO stage 3 only.",
        _zero_plus_plus_below_stage_3,
        "ignored",
    ),
    Rule(
        "overlap_comm_in_a_pipeline",
        "Pipeline parallelism does not overlap communication.",
        lambda s: s.pipeline and s.stage == 1 and s.zero.get("overlap_comm") is True,
        "ignored",
    ),
    Rule(
        "undivided_devices",
        "DeepSpeed cannot divide {}.",
        lambda s: undivided_devices(s.layout, s.slots) if s.slots else None,
    ),
    Rule(
        "undivided_heads",
        "Tensor parallelism divides {} unevenly, and each step waits for the rank with most.",
        lambda s: undivided_heads(s.layout, s.shape),
        "uneven",
    ),
    Rule("undivided_secondary_partition", "zero_hpz_partition_size cannot divide {}.", _undivided_secondary_partition),
    Rule("unshared_heads", "Ulysses cannot divide {}.", lambda s: unshared_heads(s.layout, s.shape)),
    Rule("unshared_tokens", "Ulysses cannot divide {}.", lambda s: unshared_tokens(s.layout, s.shape)),
    Rule("empty_stages", "A pipeline cannot divide {}.", lambda s: empty_stages(s.layout, s.shape)),
    Rule("undivided_experts", "DeepSpeed cannot divide {}.", lambda s: undivided_experts(s.layout, s.shape)),
)
