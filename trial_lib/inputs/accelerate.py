"""`accelerate launch`: reading the command, and typing it again with another DeepSpeed configuration."""

import json
import os
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, read_deepspeed_json
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, default_interpreter
from zerotune.trial_lib.inputs.launchers import (
    CORES,
    LOGS,
    NEVER_AGAIN,
    NO_PYTHON,
    ONE_NODE,
    PORT,
    PROCESSES,
    UserLauncher,
)
from zerotune.trial_lib.inputs.places import typed_as, with_target
from zerotune.trial_lib.inputs.words import Words, ask
from zerotune.trial_lib.messages.files import write_whole

# The variables from which accelerate reads the path of a DeepSpeed configuration, and the accumulation.
CONFIG_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"
ACCUMULATION_VARIABLE = "ACCELERATE_GRADIENT_ACCUMULATION_STEPS"

_QUESTION = Path(__file__).with_name("accelerate_question.py")
_LONGEST_ANSWER_S = 120.0
_DEEPSPEED, _SEVERAL, _ONE = "deepspeed_launcher", "multi_gpu_launcher", "simple_launcher"

_TRY_IT = "See `accelerate launch --help`, and try the command without zerotune."
_WITH_DEEPSPEED = "Start it with DeepSpeed: `accelerate launch --use_deepspeed --num_processes N SCRIPT`."

_LEFT_OUT = {
    **dict.fromkeys(("main_process_ip", "main_process_port", "rdzv_backend", "rdzv_conf"), PORT),
    **dict.fromkeys(("same_network", "machine_rank", "deepspeed_multinode_launcher"), ONE_NODE),
    **dict.fromkeys(
        ("deepspeed_hostfile", "deepspeed_inclusion_filter", "deepspeed_exclusion_filter"),
        "accelerate reads it for several nodes only",
    ),
    **dict.fromkeys(("tee", "log_dir", "role", "quiet"), LOGS),
    "max_restarts": NEVER_AGAIN,
    "monitor_interval": PROCESSES,
    "enable_cpu_affinity": CORES,
}
# With one of these settings, as an option or in the configuration file, DeepSpeed does not train, or not here.
_REFUSED = {
    "cpu": "--cpu trains without DeepSpeed: Accelerate uses DeepSpeed on a CPU as well, without this option",
    "tpu": "a TPU trains without DeepSpeed",
    "use_fsdp": "FSDP takes the place of DeepSpeed",
    "use_megatron_lm": "Megatron-LM takes the place of DeepSpeed",
    "use_parallelism_config": "a parallelism configuration needs FSDP in the place of DeepSpeed",
    "mpirun_hostfile": "mpirun starts processes on several nodes",
    "no_python": NO_PYTHON,
}
_REFUSED_FAMILIES = ("fsdp_", "megatron_lm_", "tpu_", "parallelism_config_", "aws_", "mpirun_", "vm", "env")

# ZeroTune sets these itself, because it chooses devices, ports and cores.
_OWN_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "CUDA_VISIBLE_DEVICES", "ACCELERATE_CPU_AFFINITY", CONFIG_VARIABLE)
_THREADS, _THREADS_OPTION = "OMP_NUM_THREADS", "num_cpu_threads_per_process"
# accelerate/commands/launch.py: without the option the shell's number of threads counts. The others are set on cards
# without fast links, unless the shell has them.
_DEFAULTS = (_THREADS, "NCCL_P2P_DISABLE", "NCCL_IB_DISABLE")


def read_accelerate(words: Words, launcher: UserLauncher, interpreter: str | None) -> dict[str, Any]:
    return {"launched_by": launcher.name, **parse_accelerate(words, interpreter)}


def parse_accelerate(words: Words, interpreter: str | None) -> dict[str, Any]:
    """Returns fields of `Entrypoint`, as accelerate of `interpreter` answers, or of `default_interpreter`. The script's
    arguments stay in `words`. If accelerate reads a DeepSpeed configuration file, `config_variables` names the variable
    with its path. If not, it makes a configuration from its options and the plugin, and the profile trial finds that.
    Raises InputError: accelerate refuses the command, DeepSpeed would not train, the command asks for several nodes, or
    two places set the gradient accumulation to two values.
    """
    answer = _ask(words, interpreter)
    launcher, settings, variables = answer["launcher"], answer["settings"], answer["variables"]
    _refuse(words, launcher, settings, answer["given"])
    for name, option in answer["given"].items():
        if name in _LEFT_OUT:
            words.notes.append(f"{option} is left out: {_LEFT_OUT[name]}.")
    if launcher != _DEEPSPEED:
        words.notes.append(
            "accelerate launch is not told to use DeepSpeed (--use_deepspeed, or distributed_type: DEEPSPEED in its "
            "configuration file): the code has to."
        )
    config_file = variables.get(CONFIG_VARIABLE, words.environment.get(CONFIG_VARIABLE))
    _refuse_two_accumulations(words, answer, config_file)
    words.rest = answer["arguments"]
    found: dict[str, Any] = {
        "module" if settings["module"] else "script": settings["training_script"],
        "slots": _slots(words, launcher, settings),
        "launcher_environment": {name: value for name, value in variables.items() if name not in _OWN_VARIABLES},
        "launcher_defaults": _DEFAULTS,
    }
    if _THREADS_OPTION in answer["given"]:
        # If the shell has the same number, accelerate has not changed the variable.
        found["launcher_environment"][_THREADS] = str(settings[_THREADS_OPTION])
        found["launcher_defaults"] = tuple(name for name in _DEFAULTS if name != _THREADS)
    if settings["gpu_ids"] not in (None, "all"):
        found["devices"] = _devices(words, settings["gpu_ids"])
    if config_file is not None:
        found["config_variables"] = (CONFIG_VARIABLE,)
        found["launcher_environment"][CONFIG_VARIABLE] = config_file
    return found


def _ask(words: Words, interpreter: str | None) -> dict[str, Any]:
    # The answer of `accelerate_question`, which runs in the user's environment.
    python = default_interpreter()
    if interpreter is not None:
        python = str((words.folder / interpreter).absolute()) if os.sep in interpreter else interpreter
    try:
        asked = ask(words, [python, "-c", _QUESTION.read_text(encoding="utf-8"), *words.rest], _LONGEST_ANSWER_S)
        answer: dict[str, Any] = json.loads(asked.stdout.strip().splitlines()[-1])
    except OSError as error:
        raise words.error(f"{python} cannot be started ({error.strerror}).", "Name an existing Python.") from None
    except subprocess.TimeoutExpired:
        raise words.error(f"accelerate has said nothing for {_LONGEST_ANSWER_S:.0f} s.", _TRY_IT) from None
    except (IndexError, ValueError):
        last = (asked.stderr.strip().splitlines() or ["it printed nothing"])[-1]
        raise words.error(f"accelerate cannot be asked what it would start ({last}).", _TRY_IT) from None
    if "error" in answer:
        raise words.error(f"accelerate launch refuses the command: {answer['error'].rstrip('.')}.", _TRY_IT)
    return answer


def _refuse(words: Words, launcher: str, settings: Mapping[str, Any], given: Mapping[str, str]) -> None:
    # Refuses a command that does not train with DeepSpeed on this node. The error names the setting.
    for name, why in _REFUSED.items():
        if settings.get(name):
            place = given.get(name, f"{name} in {_name_of(settings)}")
            raise words.error(f"{place} cannot be followed: {why}.", _WITH_DEEPSPEED)
    for name, option in given.items():
        if name.startswith(_REFUSED_FAMILIES):
            raise words.error(f"{option} cannot be followed: it says nothing about DeepSpeed.", "Leave it out.")
    if launcher not in (_DEEPSPEED, _SEVERAL, _ONE):
        raise words.error(
            f"{_name_of(settings)} starts a {launcher.partition('_')[0]} job: a search runs here.", _WITH_DEEPSPEED
        )
    if (settings["num_machines"] or 1) > 1:
        what = f"{given.get('num_machines', 'num_machines')} {settings['num_machines']} asks for several nodes."
        raise words.error(what, "Write 1: a search runs on one node.")
    if launcher == _ONE and settings.get("use_cpu"):
        # Under DeepSpeed accelerate ignores it.
        raise words.error(f"use_cpu in {_name_of(settings)} trains without DeepSpeed.", _WITH_DEEPSPEED)


def _slots(words: Words, launcher: str, settings: Mapping[str, Any]) -> int:
    count = settings["num_processes"]
    if launcher == _ONE:
        if count and count > 1:
            raise words.error(
                f"accelerate launch starts one process here, and not the {count} of --num_processes.", _WITH_DEEPSPEED
            )
        return 1
    if not count or count < 1:
        raise words.error("accelerate finds no device to start a process for.", "Say --num_processes N.")
    return int(count)


def _devices(words: Words, text: str) -> tuple[int, ...]:
    try:
        return tuple(sorted({int(device) for device in str(text).split(",")}))
    except ValueError:
        raise words.error(f"--gpu_ids {text} names no devices by number.", "Write it as in 0,1.") from None


def _refuse_two_accumulations(words: Words, answer: Mapping[str, Any], config_file: str | None) -> None:
    """Refuses a command whose launcher sets another gradient accumulation than its JSON file or its script's arguments.
    Accelerate would silently use the first of them.
    """
    settings = answer["settings"]
    launchers = answer["variables"].get(ACCUMULATION_VARIABLE, words.environment.get(ACCUMULATION_VARIABLE, ""))
    if not launchers.isdecimal():
        return
    places: list[tuple[Any, str]] = []
    typed = typed_as(f"--{ACCUMULATION}", answer["arguments"])
    if typed and typed[-1].value.isdecimal():
        shown = " ".join(answer["arguments"][typed[-1].begin : typed[-1].end])
        places.append((int(typed[-1].value), f"{shown} behind the script's name"))
    if config_file is not None and (words.folder / config_file).is_file():
        value = read_deepspeed_json(words.folder / config_file).get(ACCUMULATION)
        places.insert(0, (value, f'"{ACCUMULATION}": {value} in {config_file}'))
    if ACCUMULATION in answer["given"]:
        shown = f"{answer['given'][ACCUMULATION]} {launchers} of accelerate launch"
    elif settings.get(ACCUMULATION) is not None:
        shown = f"{ACCUMULATION}: {launchers} in {_name_of(settings)}"
    else:
        shown = f"{ACCUMULATION_VARIABLE}={launchers} in the environment"
    for value, other in places:
        if type(value) is int and value != int(launchers):
            raise words.error(f"{ACCUMULATION} has two values: {shown}, and {other}.", "Make them the same.")


def _name_of(settings: Mapping[str, Any]) -> str:
    return str(settings.get("config_file") or "accelerate's default configuration file")


# Types an `accelerate launch` command again, with another DeepSpeed configuration.

_CONFIG_FLAG, _LAUNCHER_CONFIG_FLAG = "--deepspeed_config_file", "--config_file"
_FIELDS_VARIABLE = "ACCELERATE_CONFIG_DS_FIELDS"
# accelerate refuses these fields of its configuration file beside a DeepSpeed configuration file.
_PLUGIN_FIELDS = (
    *("gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device"),
    *("offload_param_device", "offload_optimizer_nvme_path", "offload_param_nvme_path", "zero3_save_16bit_model"),
)
_MIXED_PRECISION = "mixed_precision"


def accelerate_words(
    entrypoint: Entrypoint, config: Mapping[str, Any], config_path: Path, launcher_config_path: Path, folder: Path
) -> list[str]:
    """Returns the words up to and with the script that start the program with another DeepSpeed configuration.

    Only the option that names the configuration differs from the user's words. accelerate refuses that option beside
    a configuration file of its own with settings for DeepSpeed. A copy of that file without them then replaces it.
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
    """
    if "ACCELERATE_USE_DEEPSPEED" not in variables:
        return dict(variables)
    fields = variables.get(_FIELDS_VARIABLE, "").split(",")
    kept = ",".join(name for name in fields if name not in (*_PLUGIN_FIELDS, _MIXED_PRECISION))
    given = {**variables, _FIELDS_VARIABLE: kept, CONFIG_VARIABLE: str(config_path)}
    if ACCUMULATION_VARIABLE in variables and ACCUMULATION in config:
        given[ACCUMULATION_VARIABLE] = str(config[ACCUMULATION])
    return given


def without_deepspeed(
    variables: Mapping[str, str], kind: str, config: Mapping[str, Any], on_processor: bool
) -> dict[str, str]:
    """The variables of ranks whose program trains by `ddp` or `fsdp2`, in a configuration's precision and accumulation.

    They are those that `accelerate launch` sets without DeepSpeed (accelerate/utils/launch.py).
    """
    kept = {name: value for name, value in variables.items() if name != "ACCELERATE_USE_DEEPSPEED"}
    sections = {name: config.get(name) for name in ("bf16", "fp16")}
    precision = [name for name, each in sections.items() if isinstance(each, Mapping) and each.get("enabled") is True]
    kept |= {"ACCELERATE_MIXED_PRECISION": (*precision, "no")[0], ACCUMULATION_VARIABLE: str(config[ACCUMULATION])}
    if on_processor:
        kept["ACCELERATE_USE_CPU"] = "true"
    if kind == "fsdp2":
        kept |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FSDP_AUTO_WRAP_POLICY": "TRANSFORMER_BASED_WRAP"}
    return kept


def _without_plugin_fields(text: str) -> str:
    settings = yaml.safe_load(text)
    section = settings.get("deepspeed_config") or {}
    settings["deepspeed_config"] = {name: value for name, value in section.items() if name not in _PLUGIN_FIELDS}
    # DeepSpeed's configuration has "bf16" or "fp16" instead.
    settings.pop(_MIXED_PRECISION, None)
    return str(yaml.safe_dump(settings, sort_keys=False))


def _default_configuration(environment: Mapping[str, str]) -> Path:
    # The file that accelerate reads if no option names one.
    cache = environment.get("XDG_CACHE_HOME") or "~/.cache"
    home = Path(environment.get("HF_HOME") or f"{cache}/huggingface").expanduser() / "accelerate"
    json_file = home / "default_config.json"
    yaml_file = json_file.with_suffix(".yaml")
    return json_file if json_file.is_file() and not yaml_file.is_file() else yaml_file


def _value_of(words: list[str], flag: str) -> str | None:
    # The last word is the script or module, and no option.
    typed = typed_as(flag, words[:-1])
    return typed[-1].value if typed else None


def _with_option(words: list[str], flag: str, value: str) -> list[str]:
    if _value_of(words, flag) is not None:
        return [*with_target(flag, words[:-1], value)[0], words[-1]]
    # `accelerate launch` or `python -m accelerate.commands.launch`.
    first = 1 + next(place for place, word in enumerate(words) if word.rpartition(".")[2] == "launch")
    return [*words[:first], flag, value, *words[first:]]
