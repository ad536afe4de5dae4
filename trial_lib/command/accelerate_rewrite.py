"""Types an `accelerate launch` command again, with another DeepSpeed configuration."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from trial_lib.command.accelerate_launch import ACCUMULATION_VARIABLE, CONFIG_VARIABLE
from trial_lib.command.entrypoint import Entrypoint
from trial_lib.deepspeed_config.overrides import ACCUMULATION
from trial_lib.wire.whole_files import write_whole

_CONFIG_FLAG, _LAUNCHER_CONFIG_FLAG = "--deepspeed_config_file", "--config_file"
_FIELDS_VARIABLE = "ACCELERATE_CONFIG_DS_FIELDS"
# accelerate refuses these fields of its configuration file beside a DeepSpeed configuration file.
_PLUGIN_FIELDS = (
    "gradient_accumulation_steps",
    "gradient_clipping",
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "offload_optimizer_nvme_path",
    "offload_param_nvme_path",
    "zero3_save_16bit_model",
)
_MIXED_PRECISION = "mixed_precision"


def accelerate_words(
    entrypoint: Entrypoint, config: Mapping[str, Any], config_path: Path, launcher_config_path: Path, folder: Path
) -> list[str]:
    """Returns the words up to and with the script that start the program with another DeepSpeed configuration.

    Only the option that names the configuration differs from the user's words. accelerate refuses that option beside
    a configuration file of its own with settings for DeepSpeed. A copy of that file without them then replaces it.

    Args:
        entrypoint: a command that accelerate starts.
        config: the DeepSpeed configuration.
        config_path: the file with that configuration.
        launcher_config_path: the file for the copy of accelerate's configuration file, if a copy is needed.
        folder: the folder of the command's relative paths.
    """
    words = list(entrypoint.launcher)
    if entrypoint.config_positions and not entrypoint.config_variables:
        # The script's arguments name the file, as the Trainer's `--deepspeed` does.
        return words
    if "ACCELERATE_USE_DEEPSPEED" not in entrypoint.launcher_environment:
        return ["env", f"{CONFIG_VARIABLE}={config_path}", *words]
    fields = entrypoint.launcher_environment.get(_FIELDS_VARIABLE, "").split(",")
    if not {*_PLUGIN_FIELDS, _MIXED_PRECISION}.isdisjoint(fields):
        own = _value_of(words, _LAUNCHER_CONFIG_FLAG)
        path = folder / own if own is not None else _default_configuration({**os.environ, **entrypoint.environment})
        write_whole(launcher_config_path, _without_plugin_fields(path.read_text(encoding="utf-8")))
        words = _with_option(words, _LAUNCHER_CONFIG_FLAG, str(launcher_config_path))
    if _value_of(words, f"--{ACCUMULATION}") is not None and ACCUMULATION in config:
        words = _with_option(words, f"--{ACCUMULATION}", str(config[ACCUMULATION]))
    return _with_option(words, _CONFIG_FLAG, str(config_path))


def accelerate_variables(variables: Mapping[str, str], config: Mapping[str, Any], config_path: Path) -> dict[str, str]:
    """Returns the variables that `accelerate launch` has set for a program, with another DeepSpeed configuration.

    A program such as `trl` calls the launcher in its own process. The command that trains then begins with them.

    Args:
        variables: of the command.
        config: the DeepSpeed configuration.
        config_path: the file with that configuration.
    """
    if "ACCELERATE_USE_DEEPSPEED" not in variables:
        return dict(variables)
    fields = variables.get(_FIELDS_VARIABLE, "").split(",")
    kept = ",".join(name for name in fields if name not in (*_PLUGIN_FIELDS, _MIXED_PRECISION))
    given = {**variables, _FIELDS_VARIABLE: kept, CONFIG_VARIABLE: str(config_path)}
    if ACCUMULATION_VARIABLE in variables and ACCUMULATION in config:
        given[ACCUMULATION_VARIABLE] = str(config[ACCUMULATION])
    return given


def _without_plugin_fields(text: str) -> str:
    settings = yaml.safe_load(text)
    section = settings.get("deepspeed_config") or {}
    settings["deepspeed_config"] = {name: value for name, value in section.items() if name not in _PLUGIN_FIELDS}
    # DeepSpeed's configuration has "bf16" or "fp16" instead.
    settings.pop(_MIXED_PRECISION, None)
    return str(yaml.safe_dump(settings, sort_keys=False))


def _default_configuration(environment: Mapping[str, str]) -> Path:
    """Returns the file that accelerate reads if no option names one."""
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(environment.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "accelerate"
    json_file = home / "default_config.json"
    yaml_file = json_file.with_suffix(".yaml")
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def _position_of(words: list[str], flag: str) -> int | None:
    """Returns the position of an option. The last word is the script or module, and no option."""
    for position, word in enumerate(words[:-1]):
        if word.partition("=")[0].replace("-", "_") == flag.replace("-", "_"):
            return position
    return None


def _value_of(words: list[str], flag: str) -> str | None:
    position = _position_of(words, flag)
    if position is None:
        return None
    _, equals, value = words[position].partition("=")
    return value if equals else words[position + 1]


def _with_option(words: list[str], flag: str, value: str) -> list[str]:
    """Returns the words with an option set, in its place or as the launcher's first option."""
    position = _position_of(words, flag)
    if position is None:
        # `accelerate launch` or `python -m accelerate.commands.launch`.
        first = 1 + next(place for place, word in enumerate(words) if word.rpartition(".")[2] == "launch")
        return [*words[:first], flag, value, *words[first:]]
    name, equals, _ = words[position].partition("=")
    if equals:
        return [*words[:position], f"{name}={value}", *words[position + 1 :]]
    return [*words[: position + 1], value, *words[position + 2 :]]
