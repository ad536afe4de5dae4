"""The DeepSpeed configuration in hyperparameters, merging overrides into a configuration, and the batch of one.

A rank imports this module from the user's environment: standard library only.
"""

import base64
import binascii
import copy
import hashlib
import json
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import ranks_of_a_replica
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded
from zerotune.trial_lib.messages.measurement import BatchSizes

# Reads a DeepSpeed configuration from a file, or from the text that DeepSpeed accepts instead.

_NAME = re.compile(r"[A-Za-z][\w-]{0,254}")  # what is longer names no file
# A bracket, after comments.
_OBJECT = re.compile(r"(?:\s|#[^\n]*\n|//[^\n]*\n|/\*.*?\*/)*\{", re.DOTALL)


def read_deepspeed_json(path: Path) -> dict[str, Any]:
    """Returns the DeepSpeed configuration in a JSON file. Comments and trailing commas are allowed, as in DeepSpeed. It
    is an `InputError` if the file is missing or unreadable, is not JSON (with line and column), holds no object, or has
    a key twice. JSON would silently keep the last one.
    """
    try:
        text = read_bounded(path)
    except FileNotFoundError:
        raise InputError(
            "the DeepSpeed configuration does not exist.",
            where=str(path),
            remedy="Name an existing JSON file, relative to the model directory.",
        ) from None
    except (OSError, ValueError) as error:  # not UTF-8, or a name that no file can have
        raise InputError(
            f"the DeepSpeed configuration cannot be read ({error}).",
            where=str(path),
            remedy="Make it a readable UTF-8 file.",
        ) from None
    return _parse(text, str(path))


def read_named_config(value: str, folder: Path, *, where: str) -> dict[str, Any]:
    """Returns the DeepSpeed configuration that the value of an argument names. It is the path of a file, or the
    configuration itself: as JSON, which Hugging Face takes, or as the base64 of its JSON, which DeepSpeed takes.
    Relative paths start from the folder. Errors name the place `where` it stands. What is none of them, or is not
    usable (see `read_deepspeed_json`), is an `InputError`.
    """
    try:
        is_path = (folder / value).exists()
    except (OSError, ValueError):  # too long for a path
        is_path = False
    if is_path:
        return read_deepspeed_json(folder / value)
    text = value if value.lstrip().startswith("{") else _decoded(value)
    if text:
        return _parse(text, where)
    raise InputError(
        f"the DeepSpeed configuration {value} does not exist.",
        where=where,
        remedy=f"Name an existing JSON file, relative to {folder}.",
    )


def is_programs_own_name(value: str, folder: Path, script: str | None = None) -> bool:
    """Returns whether a value names a configuration that only the program can find, as `zero2` does in ms-swift. Such a
    name is one word, or a file beside the script. Any other path with a folder or an ending is mistyped.
    """
    try:
        is_beside = bool(value and script) and (folder / str(script)).parent.joinpath(value).is_file()
        is_name = bool(_NAME.fullmatch(value)) and not _decoded(value)
        return (is_beside or is_name) and not (folder / value).exists()
    except (OSError, ValueError):  # no path
        return False


def named_alike(value: str, config: Mapping[str, Any], path: Path) -> str:
    """Returns the value that names another configuration in the form that the user chose. Code that decodes its
    configuration itself takes no path.
    """
    if value.lstrip().startswith("{"):
        return json.dumps(config)
    return base64.urlsafe_b64encode(json.dumps(config).encode()).decode() if _decoded(value) else str(path)


def _decoded(value: str) -> str:
    # The text of an object that is written in base64; empty for anything else.
    try:
        decoded = base64.urlsafe_b64decode(value).decode()
    except (binascii.Error, ValueError):
        return ""
    return decoded if decoded.lstrip().startswith("{") else ""


def _parse(text: str, where: str) -> dict[str, Any]:
    def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        section = dict(pairs)
        if len(section) < len(pairs):
            keys = [key for key, _ in pairs]
            twice = next(key for key in keys if keys.count(key) > 1)
            raise InputError(
                f'the key "{twice}" occurs twice in one object.', where=where, remedy="Keep one of the two."
            )
        return section

    try:
        config = json.loads(text, object_pairs_hook=refuse_duplicates)
    except json.JSONDecodeError as error:
        config = _parse_hjson(text, where, refuse_duplicates, error)
    except (ValueError, RecursionError) as error:  # a number of thousands of digits, thousands of brackets
        raise InputError(f"not usable JSON: {error}.", where=where, remedy="Mend the JSON.") from None
    if not isinstance(config, dict):
        raise InputError(
            f"a DeepSpeed configuration is a JSON object, this is {type(config).__name__}.",
            where=where,
            remedy='Wrap it in { } with DeepSpeed\'s keys, such as "train_micro_batch_size_per_gpu".',
        )
    return config


def _parse_hjson(text: str, where: str, hook: Callable[..., dict[str, Any]], mistake: json.JSONDecodeError) -> Any:
    # DeepSpeed depends on it, but most configurations do not need it.
    import hjson

    at = mistake.msg, mistake.lineno, mistake.colno
    if not _OBJECT.match(text):
        # Hjson needs no outer brackets, so a YAML file would be accepted.
        raise InputError(f"not valid JSON: {at[0]}.", where=f"{where}:{at[1]}:{at[2]}", remedy="Mend the JSON there.")
    try:
        config = hjson.loads(text, object_pairs_hook=hook)
    except hjson.HjsonDecodeError as error:
        config, at = None, (error.msg, error.lineno, error.colno)
    except (ValueError, RecursionError):
        config = None
    if not isinstance(config, dict):  # words without brackets are a text
        what, line, column = at
        raise InputError(f"not valid JSON: {what}.", where=f"{where}:{line}:{column}", remedy="Mend the JSON there.")
    return config


DeepSpeedConfig = dict[str, Any]

MICRO_BATCH = "train_micro_batch_size_per_gpu"
ACCUMULATION = "gradient_accumulation_steps"
TRAIN_BATCH = "train_batch_size"

CONFIG, OVERWRITES = "deepspeed_config", "overwrite_deepspeed_args"
"""The two keys of the hyperparameters that are ZeroTune's."""

TRAINING_ARGUMENTS = {MICRO_BATCH: "per_device_train_batch_size", ACCUMULATION: "gradient_accumulation_steps"}
"""The names of the batch keys in Hugging Face's `TrainingArguments`."""

_ZERO = "zero_optimization"
# Sections that only a tuner reads.
_TUNING_KEYS = ("autotuning",)
# Older switches that are sections now. DeepSpeed refuses both side by side (zero/config.py).
_OFFLOADS = {"cpu_offload": "offload_optimizer", "cpu_offload_param": "offload_param"}

# Keys that make hyperparameters a DeepSpeed configuration, which always has a batch size.
_BATCH_SIZES = (TRAIN_BATCH, MICRO_BATCH)

# The keys that DeepSpeed 0.16 to 0.19 reads from a configuration, and those that later versions refuse.
_KEYS = """
activation_checkpointing aio amp autotuning bf16 bfloat16 checkpoint comet comms_logger communication_data_type compile
compression_training csv_monitor curriculum_learning data_efficiency data_types dataloader_drop_last datastates_ckpt
disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel flops_profiler fp16
gradient_accumulation_steps gradient_allreduce_op gradient_clipping gradient_predivide_factor graph_harvesting
hybrid_engine log_level managed_gradient_accumulation memory_breakdown nebula optimizer pipeline prescale_gradients
progressive_layer_drop quantize_training scheduler seq_parallel_communication_data_type sequence_parallel_size
sparse_attention sparse_gradients steps_per_print tensor_parallel tensorboard timers torch_autocast train_batch_size
train_micro_batch_size_per_gpu use_data_before_expert_parallelism vocabulary_size wall_clock_breakdown wandb
weight_quantization zero_allow_untested_optimizer zero_force_ds_cpu_optimizer zero_optimization
"""
DEEPSPEED_KEYS = frozenset(_KEYS.split())


def overwrite_deepspeed_config(base: str | Path | Mapping[str, Any], overrides: Mapping[str, Any]) -> DeepSpeedConfig:
    """Returns a new DeepSpeed configuration: `base` with `overrides` merged in, section by section. As
    `determined.pytorch.dsat.overwrite_deepspeed_config`. A mapping is merged into a mapping, and any other value
    replaces the old one. Neither argument is changed. If the overrides set the micro-batch size and the accumulation
    without `train_batch_size`, the base's `train_batch_size` is dropped, because DeepSpeed derives it. It is dropped
    too if several ranks hold one replica. Under AutoTP DeepSpeed takes each rank for a replica then, and would refuse
    the true number. A ZeRO section that is `true` or `false`, and the deprecated names `cpu_offload` and
    `cpu_offload_param`, become what DeepSpeed makes of them. An offload section that is None is left out.

    Raises:
        InputError: the file is missing, is not JSON, or has a key twice.
    """
    config = copy.deepcopy(dict(base)) if isinstance(base, Mapping) else read_deepspeed_json(Path(base))
    _merge(_modernised(config), _modernised(copy.deepcopy(dict(overrides))))
    zero = config.get(_ZERO)
    for old, section in _OFFLOADS.items():
        # To DeepSpeed both are the same. Accelerate asks any section for its device.
        if isinstance(zero, dict) and zero.get(section, "") is None:
            del zero[section]
            zero.pop(old, None)
    # deepspeed/runtime/config.py, 0.19.8: under AutoTP its world size is that of all ranks. If a switch of the program
    # makes the groups, the engine shows whether it has as many replicas as are meant (`replicas.py`).
    follows = TRAIN_BATCH not in overrides or ranks_of_a_replica(config) > 1
    if MICRO_BATCH in overrides and ACCUMULATION in overrides and follows:
        config.pop(TRAIN_BATCH, None)
    return config


def with_open_batch(config: Mapping[str, Any], own: Mapping[str, Any]) -> DeepSpeedConfig:
    """Returns a complete configuration whose `train_batch_size` is left open if the user's leaves it open. It is the
    product of the two other sizes and the ranks, and DeepSpeed checks it. Code may read a configuration before the
    process group exists, as `zero.Init` does within `from_pretrained`. Then DeepSpeed counts one rank. The user's is
    empty if it is in the code.
    """
    typed = own.get(TRAIN_BATCH)
    if typed == "auto":
        return {**config, TRAIN_BATCH: typed}
    is_open = bool(own) and typed is None
    return {key: value for key, value in config.items() if key != TRAIN_BATCH or not is_open}


def with_typed_sizes(config: Mapping[str, Any], divided_among: int) -> DeepSpeedConfig:
    """Returns a configuration with the sizes that a program types whose ranks divide each batch among them."""
    sizes = {key: config[key] * divided_among for key in (MICRO_BATCH, TRAIN_BATCH) if type(config.get(key)) is int}
    return {**config, **sizes}


def _merge(target: DeepSpeedConfig, overrides: Mapping[str, Any]) -> None:
    for key, value in overrides.items():
        if isinstance(value, Mapping) and isinstance(target.get(key), dict):
            _merge(target[key], value)
        else:
            target[key] = value


def _modernised(config: DeepSpeedConfig) -> DeepSpeedConfig:
    zero = config.get(_ZERO)
    if isinstance(zero, bool):
        zero = config[_ZERO] = {"stage": int(zero)}
    for old, section in _OFFLOADS.items():
        if isinstance(zero, dict) and old in zero and zero.get(section) is None:
            zero[section] = {"device": "cpu"} if zero.pop(old) else None
    return config


def difference(base: Mapping[str, Any], config: Mapping[str, Any]) -> DeepSpeedConfig:
    """Returns the overrides that turn one complete configuration into another, without "auto"."""
    base, config = overwrite_deepspeed_config(base, {}), overwrite_deepspeed_config(config, {})
    overrides = _difference(base, config)
    if TRAIN_BATCH in base and TRAIN_BATCH not in config:
        # It is dropped if both of these are named, whether they differ or not, because it follows from them.
        overrides |= {key: config[key] for key in (MICRO_BATCH, ACCUMULATION) if config.get(key, "auto") != "auto"}
    before, after = (each.get(_ZERO) or {} for each in (base, config))
    withdrawn = {section: None for section in _OFFLOADS.values() if section in before and section not in after}
    return {**overrides, _ZERO: {**overrides.get(_ZERO, {}), **withdrawn}} if withdrawn else overrides


def _difference(base: Mapping[str, Any], config: Mapping[str, Any]) -> DeepSpeedConfig:
    overrides: DeepSpeedConfig = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and isinstance(base.get(key), Mapping):
            if section := _difference(base[key], value):
                overrides[key] = section
        elif value != base.get(key) and value != "auto":
            overrides[key] = value
    return overrides


def get_ds_config_from_hparams(hparams: Mapping[str, Any], base_dir: str | Path = ".") -> DeepSpeedConfig:
    """Returns the DeepSpeed configuration of an experiment's hyperparameters. As
    `determined.pytorch.dsat.get_ds_config_from_hparams`: `deepspeed_config` (a path below `base_dir`, or the
    configuration itself) or DeepSpeed's own keys among the others, and, optionally, `overwrite_deepspeed_args`.

    Raises:
        KeyError: there is neither `deepspeed_config` nor a batch size of DeepSpeed's.
        InputError: the file is missing, is not JSON, or has a key twice.
    """
    base = hparams.get(CONFIG)
    if base is None:
        base = inline_ds_config(hparams)
    if base is None:
        raise KeyError(
            f"The hyperparameters hold no DeepSpeed configuration: add {CONFIG}, with the name of its file or the "
            f"configuration itself, or DeepSpeed's own keys, {TRAIN_BATCH} or {MICRO_BATCH} among them."
        )
    if not isinstance(base, Mapping):
        base = Path(base_dir) / base
    return overwrite_deepspeed_config(base, hparams.get(OVERWRITES) or {})


def inline_ds_config(hparams: Mapping[str, Any]) -> DeepSpeedConfig | None:
    """Returns the DeepSpeed configuration among the hyperparameters; None if there is none."""
    if hparams.get(CONFIG) is not None or not any(key in hparams for key in _BATCH_SIZES):
        return None
    return {key: value for key, value in hparams.items() if key in DEEPSPEED_KEYS}


def config_hash(config: Mapping[str, Any]) -> str:
    """Returns 16 hexadecimal digits that identify a complete DeepSpeed configuration in any order of its keys."""
    canonical = json.dumps(config, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def without_tuning_keys(config: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a configuration without the sections for tuners. One of them ends the process after a few steps."""
    return {key: value for key, value in config.items() if key not in _TUNING_KEYS}


# The batch triple: train_batch_size = micro-batch size * accumulation steps * model replicas, with gaps filled in.

_WHERE = "the DeepSpeed configuration"


def resolve_batch(config: Mapping[str, Any], data_parallel_size: int) -> BatchSizes:
    """Returns the batch triple of a DeepSpeed configuration, its missing parts derived as DeepSpeed derives them.
    "auto" counts as missing, so that accumulation is 1 unless the other two give another number.

    Raises:
        InputError: the parts contradict each other, one of them is not a whole number above 0, or too few are given.

    Example:
        >>> resolve_batch({"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4}, data_parallel_size=2)
        BatchSizes(train_batch_size=32, micro_batch_size=4, gradient_accumulation_steps=4)
    """
    train, micro, accumulation = (_given(config, key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION))
    if micro is None:
        if train is None:
            raise InputError(
                f"neither {TRAIN_BATCH} nor {MICRO_BATCH} says how large a batch is.",
                where=_WHERE,
                remedy=f"Set {MICRO_BATCH} to a number.",
            )
        micro = train // data_parallel_size // (accumulation or 1)
    elif train is not None and accumulation is None:
        accumulation = train // micro // data_parallel_size
    if accumulation is None:
        accumulation = 1
    product = micro * accumulation * data_parallel_size
    if train not in (None, product):
        raise InputError(
            f"{TRAIN_BATCH}({train}) != "
            f"micro({micro}) * accumulation({accumulation}) * replicas({data_parallel_size}).",
            where=_WHERE,
            remedy=f"Change one of them, or leave {TRAIN_BATCH} out: it follows from the others.",
        )
    return BatchSizes(product, micro, accumulation)


def _given(config: Mapping[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is None or value == "auto":
        return None
    if type(value) is not int or value < 1:
        raise InputError(f"{key} is {value!r}.", where=_WHERE, remedy="Make it a whole number above 0.")
    return value


def sequence_parallel_size(engine: Any) -> int:
    """Returns the ranks that share the tokens of a sample (Ulysses); 1 without it, and before DeepSpeed had it."""
    return max(1, int(getattr(engine, "sequence_parallel_size", 1) or 1))


def replicas_of(engine: Any) -> int:
    """Returns the model replicas of an engine. Each has a batch of its own."""
    own = engine.dp_world_size
    if own is not None:
        return int(own)
    # deepspeed/utils/groups.py: under Ulysses DeepSpeed leaves it out, and ZeRO partitions over all ranks of a group.
    return max(1, int(engine.seq_dp_world_size) // sequence_parallel_size(engine))


# The format in which DeepSpeed adds gradients up over micro-batches: `data_types.grad_accum_dtype`.

# deepspeed/runtime/config.py `DtypeEnum` (0.19.8).
_SHORT_NAMES = {
    **dict.fromkeys(("torch.float16", "float16", "half", "fp16"), "fp16"),
    **dict.fromkeys(("torch.float32", "float32", "float", "fp32"), "fp32"),
    **dict.fromkeys(("torch.bfloat16", "bfloat16", "bf16"), "bf16"),
}


def short_name(dtype: Any) -> str | None:
    """Returns the short name of a type, such as `fp32`, by any of its names; None for anything else."""
    return _SHORT_NAMES.get(dtype) if isinstance(dtype, str) else None


def adds_up_in_32_bits(ds_config: Mapping[str, Any]) -> bool:
    types = ds_config.get("data_types")
    return isinstance(types, Mapping) and short_name(types.get("grad_accum_dtype")) == "fp32"


def is_bf16_with_32_bit_sums(ds_config: Mapping[str, Any]) -> bool:
    """Returns whether bf16 gradients add up in 32 bits. At stage 1 without offload, DeepSpeed's optimizer is then
    `BF16_Optimizer` (deepspeed/runtime/engine.py `_do_optimizer_sanity_check`).
    """
    sections = [ds_config.get(name) for name in ("bf16", "bfloat16")]
    is_bf16 = any(isinstance(section, Mapping) and section.get("enabled") is True for section in sections)
    return is_bf16 and adds_up_in_32_bits(ds_config)
