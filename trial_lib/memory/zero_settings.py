"""The settings of a DeepSpeed configuration that decide the memory of a rank, with DeepSpeed's defaults."""

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from trial_lib.command.switches import deepspeed_part, switch_key
from trial_lib.deepspeed_config.layout import AUTOTP, SEQUENCE, Layout
from trial_lib.memory.states import STATE_BYTES, Precision, precision_of
from trial_lib.space.catalogue import KNOBS, is_coarse
from trial_lib.space.effects import Effect
from trial_lib.space.knobs import STAGE, get_knob, leaves
from trial_lib.space.known_knobs.offload import OFFLOAD_OPTIMIZER, OFFLOAD_PARAM

# Defaults of deepspeed/runtime/zero/config.py (0.19.8).
_BUCKET = 500_000_000
_LIVE = _REUSE = _SUB_GROUP = 1_000_000_000

_STATE_BYTES = {"adagrad": 4, "lion": 4, "fusedlion": 4, "muon": 4}
ADAM_STATE_BYTES = 8

ArmKey = tuple[tuple[str, object], ...]
"""The settings of an arm, by name. None of them stands there twice."""

# Coarse settings that the settings below have, whatever their spelling.
_IN_SETTINGS = ("bf16.enabled", "bfloat16.enabled", "fp16.enabled", AUTOTP, SEQUENCE)
# Coarse sections that change the result of a training. Of their settings these alone change its memory or its time.
_MATHEMATICS = ("fp16", "gradient_clipping", "optimizer", "scheduler")
_NOT_MATHEMATICS_ALONE = ("fp16.fp16_master_weights_and_grads", "optimizer.type")


@dataclass(frozen=True)
class ZeroSettings:
    """The memory settings of one configuration.

    Attributes:
        stage: the ZeRO stage.
        offload_optimizer: the place of the optimizer's states: `none` for the device, else `cpu` or `nvme`.
        offload_param: the place of parameters that are not needed. `none` below stage 3, which ignores it.
        precision: of the parameters.
        optimizer_bytes: bytes of the optimizer's states for one trainable parameter, without master copies.
        torch_adam: whether the optimizer is PyTorch's Adam, which does not update in place as DeepSpeed's kernels do.
        reduce_bucket_size: elements of a gradient bucket.
        overlap_comm: whether two such buckets take turns.
        contiguous_gradients: whether gradients are copied into the bucket.
        max_live_parameters: the most parameters that stage 3 keeps gathered.
        sub_group_size: parameters that stage 3 updates at a time.
        layout: how the ranks share a replica of the model.
    """

    stage: int
    offload_optimizer: str
    offload_param: str
    precision: Precision
    optimizer_bytes: int
    torch_adam: bool
    reduce_bucket_size: int
    overlap_comm: bool
    contiguous_gradients: bool
    max_live_parameters: int
    sub_group_size: int
    layout: Layout = field(default_factory=Layout)

    @classmethod
    def of(cls, ds_config: Mapping[str, Any], bytes_per_param: int | None = None) -> "ZeroSettings":
        """Returns the settings of a complete configuration. "auto" counts as absent.

        Args:
            ds_config: the configuration. It may have the sections of switches and of layouts.
            bytes_per_param: as in `ModelProfile`.
        """
        zero, optimizer = _section(ds_config, "zero_optimization"), _section(ds_config, "optimizer")
        stage = _number(zero, "stage", 0)
        precision = precision_of(ds_config, bytes_per_param)
        return cls(
            stage=stage,
            offload_optimizer=_offload(zero, "offload_optimizer") if stage >= 1 else "none",
            offload_param=_offload(zero, "offload_param") if stage == 3 else "none",
            precision=precision,
            optimizer_bytes=_optimizer_bytes(optimizer) * precision.state_bytes // STATE_BYTES,
            torch_adam=_is_torch_adam(optimizer),
            reduce_bucket_size=_number(zero, "reduce_bucket_size", _BUCKET),
            overlap_comm=bool(_get(zero, "overlap_comm", stage == 3)),
            contiguous_gradients=bool(_get(zero, "contiguous_gradients", True)),
            # A parameter is freed if it is not needed soon, or if there is no room for it.
            max_live_parameters=min(
                _number_of_stage_3(zero, "max_live_parameters", _LIVE),
                _number_of_stage_3(zero, "max_reuse_distance", _REUSE),
            ),
            sub_group_size=_number(zero, "sub_group_size", _SUB_GROUP),
            layout=Layout.of(ds_config),
        )


def arm_key(ds_config: Mapping[str, Any], switches: Collection[str] | None = None) -> ArmKey:
    """Returns the coarse settings of memory and time, which all configurations of one arm have in common.

    Settings that change the result of a training alone are not among them, such as a learning rate.

    Args:
        ds_config: a complete configuration. Its section `program` may have switches.
        switches: the places of the switches that make an arm; None for all in that section.
    """
    settings = ZeroSettings.of(ds_config)
    return (
        ("stage", settings.stage),
        ("offload_optimizer", settings.offload_optimizer),
        ("offload_param", settings.offload_param),
        ("precision", settings.precision),
        ("optimizer_bytes", settings.optimizer_bytes),
        ("layout", settings.layout),
        *_other_coarse(ds_config, settings),
        *switch_key(ds_config, switches),
    )


def different_settings(one: ArmKey, other: ArmKey) -> int:
    """Returns the number of settings in which two arms differ, beside the ZeRO stage."""
    return len({name for name, _ in set(one) ^ set(other)} - {"stage"})


def _other_coarse(ds_config: Mapping[str, Any], settings: ZeroSettings) -> Iterator[tuple[str, object]]:
    """Yields the other coarse settings that act at a stage and differ from DeepSpeed's defaults."""
    for path, value in sorted(leaves(deepspeed_part(ds_config))):
        if value is None or value == "auto" or not is_coarse(path) or path in (STAGE, *_IN_SETTINGS, *_OFFLOADS):
            continue
        known = KNOBS.get(path)
        if known is None:
            if path in _NOT_MATHEMATICS_ALONE or path.partition(".")[0] not in _MATHEMATICS:
                yield path, str(value).lower()
        elif value != known.default and any(_acts(effect, ds_config, settings) for effect in known.effects):
            yield path, repr(value)


def _acts(effect: Effect, ds_config: Mapping[str, Any], settings: ZeroSettings) -> bool:
    """Returns whether an effect may be there, as far as a configuration shows it."""
    return settings.stage in effect.stages and all(
        _value_of(path, ds_config, settings) in values for path, values in effect.when.items()
    )


def _value_of(path: str, ds_config: Mapping[str, Any], settings: ZeroSettings) -> Any:
    if path in _OFFLOADS:
        return _OFFLOADS[path](settings)
    known = KNOBS.get(path)
    return _get({path: get_knob(ds_config, path)}, path, None if known is None else known.default)


def arm_label(ds_config: Mapping[str, Any]) -> str:
    """Returns the label of an arm, such as `z3-offload-optimizer`, without finer differences."""
    settings = ZeroSettings.of(ds_config)
    stage = _get(_section(ds_config, "zero_optimization"), "stage", 0)
    offloads = {"optimizer": settings.offload_optimizer, "param": settings.offload_param}
    # A report may be of a configuration that DeepSpeed refuses.
    named = f"z{settings.stage}" if isinstance(stage, (int, str, float)) else "z?"
    return named + "".join(f"-offload-{what}" for what, where in offloads.items() if where != "none")


_OFFLOADS: Mapping[str, Callable[[ZeroSettings], str]] = {
    OFFLOAD_OPTIMIZER: lambda settings: settings.offload_optimizer,
    OFFLOAD_PARAM: lambda settings: settings.offload_param,
}


def _get(section: Mapping[str, Any], key: str, default: Any) -> Any:
    value = section.get(key)
    return default if value is None or value == "auto" else value


def _section(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """Returns a section; an empty one for a value that DeepSpeed refuses there. Such a study has a report too."""
    section = config.get(key)
    return section if isinstance(section, Mapping) else {}


def _number(section: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a number, which DeepSpeed also takes as a text; the default for anything else, and beyond 64 bits."""
    try:
        number = int(_get(section, key, default))
    except (TypeError, ValueError, OverflowError):
        return default
    return number if abs(number) < 2**63 else default


def _number_of_stage_3(zero: Mapping[str, Any], key: str, default: int) -> int:
    """Returns a number of stage 3, by its documented name or by its name without the stage."""
    return _number(zero, f"stage3_{key}", _number(zero, key, default))


def _offload(zero: Mapping[str, Any], key: str) -> str:
    return str(_get(_section(zero, key), "device", "none"))


def _optimizer_bytes(optimizer: Mapping[str, Any]) -> int:
    """Returns the bytes of one parameter's states in 32 bits. They are Adam's if the code makes the optimizer."""
    name = str(optimizer.get("type", "")).lower()
    if name == "sgd":
        return 4 if _get(_section(optimizer, "params"), "momentum", 0) else 0
    return _STATE_BYTES.get(name, ADAM_STATE_BYTES)


def _is_torch_adam(optimizer: Mapping[str, Any]) -> bool:
    """Returns whether PyTorch's own Adam runs: the configuration asks for it, or the code makes the optimizer."""
    name = str(optimizer.get("type", "")).lower()
    return not name or (name in ("adam", "adamw") and _get(_section(optimizer, "params"), "torch_adam", False) is True)
