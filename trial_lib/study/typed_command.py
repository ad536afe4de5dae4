"""A typed command instead of an experiment's YAML: its words become the fields of an experiment."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.nvml import VARIABLE
from zerotune.trial_lib.device.this_host import kind_of, this_host
from zerotune.trial_lib.inputs.config import MappedKey, Resources
from zerotune.trial_lib.inputs.entrypoint import Entrypoint
from zerotune.trial_lib.inputs.launchers import is_environment_from, launcher_named, launcher_of, python_programs
from zerotune.trial_lib.inputs.places import MAPPING_TARGET, PLACES
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.inputs.words import ASSIGNMENT
from zerotune.trial_lib.inputs.yaml_document import YamlDocument
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.records.switches import PROGRAM

_WHERE = "the command"


def read_command(
    command: Sequence[str],
    arg_mappings: Mapping[str, str],
    folder: Path,
    host: Host | None,
    include: Sequence[Path] = (),
    vary: Mapping[str, Any] | None = None,
    wrapper: Sequence[str] = (),
) -> Experiment:
    """The experiment of a command, as a shell in this environment would run it.

    Without a `host` it does not run on this one's devices. Then a number of ranks that depends on them is 1. `wrapper`
    is what the user typed, if that starts the command from the same folder. Raises InputError if the command cannot be
    read, or names something that does not exist.
    """
    for word in command:
        try:
            word.encode()
        except UnicodeEncodeError:
            raise InputError(
                f"the word {word!r} is not UTF-8.", where=_WHERE, remedy="Give it in UTF-8, or in a file of your own."
            ) from None
    fields: dict[str, Any] = {"follow_launcher": True, "entrypoint": _as_found(command, folder)}
    if not folder.resolve().name:
        fields["name"] = "study"
    if arg_mappings:
        fields["arg_mappings"] = dict(arg_mappings)
    if vary:
        fields["search_space"] = {PROGRAM: dict(vary)}
    experiment = read_experiment(YamlDocument(Path(_WHERE), fields), folder, include=include, wrapper=wrapper)
    entrypoint = experiment.entrypoint
    if entrypoint.trial_class is not None:
        raise InputError(
            f"{entrypoint.trial_class} is a trial class, which needs an experiment's YAML.",
            where=_WHERE,
            remedy="Write it as the entrypoint of one, and tune by `zerotune asha CONFIG_PATH MODEL_DIR`.",
        )
    if host is None:
        slots = entrypoint.slots if isinstance(entrypoint.slots, int) else 1
    else:
        slots = _ranks(entrypoint, devices_of(entrypoint, host))
    # How many ranks start shows only once the words are read.
    resources: dict[str, Any] = {
        "slots_per_trial": slots,
        **({"hosts": dict(entrypoint.hosts)} if entrypoint.hosts else {}),
    }
    return replace(
        experiment,
        document=YamlDocument(experiment.document.path, {**fields, "resources": resources}),
        config=experiment.config.model_copy(update={"resources": Resources(**resources)}),
    )


def devices_of(entrypoint: Entrypoint, host: Host) -> Host:
    """The host with only the devices that a command may use. Raises InputError if it names one that the host lacks."""
    kind = kind_of(host.device)
    visible = None if kind.visible_by is None else entrypoint.environment.get(kind.visible_by)
    is_free = entrypoint.slots == "memory_nodes"
    if kind.visible_by and kind.visible_by in os.environ and _names_devices(entrypoint):
        raise InputError(
            f"the launcher numbers all devices of this host, and {kind.visible_by} hides some from zerotune.",
            where=_WHERE,
            remedy=f"Unset {kind.visible_by}, or leave --include and --exclude out.",
        )
    is_overridden = launcher_named(entrypoint.launched_by).overrides_visible_devices and not is_free
    if visible is not None and not is_overridden:
        seen = this_host(visible, {**os.environ, **entrypoint.environment})
        if seen.device != host.device:
            raise InputError(
                f"{kind.visible_by}={visible} names no {kind.resource} of this host.",
                where=_WHERE,
                remedy="Name one, or set the variable for zerotune itself to tune on processors.",
            )
        return seen
    for device in (*(entrypoint.devices or ()), *entrypoint.excluded_devices):
        if device >= len(host.slots):
            raise InputError(
                f"the launcher is told of device {device}, but this host has {len(host.slots)} {host.device} slot(s).",
                where=_WHERE,
                remedy=f"Name devices from 0 to {len(host.slots) - 1}.",
            )
    numbers = range(len(host.slots)) if entrypoint.devices is None else entrypoint.devices
    left = [number for number in numbers if number not in entrypoint.excluded_devices]
    if not left:
        raise InputError("the launcher is left no device.", where=_WHERE, remedy="Exclude fewer.")
    if _names_devices(entrypoint) and len(set(host.models.values())) > 1:
        # The launcher passes the numbers to CUDA.
        return this_host(",".join(map(str, left)), {**os.environ, **entrypoint.environment})
    return replace(host, slots=[host.slots[number] for number in left])


def _names_devices(entrypoint: Entrypoint) -> bool:
    return entrypoint.devices is not None or bool(entrypoint.excluded_devices)


def check_mappings(mappings: Sequence[str]) -> dict[str, str]:
    """`--map KEY=TARGET` as a mapping. Raises InputError for a wrong key, target, or one that occurs twice."""
    found: dict[str, str] = {}
    for mapping in mappings:
        key, _, target = mapping.partition("=")
        where = f"--map {mapping}"
        if key not in get_args(MappedKey):
            keys = ", ".join(get_args(MappedKey))
            raise InputError(f'the key "{key}" cannot be mapped.', where=where, remedy=f"Map one of {keys}.")
        if not re.fullmatch(MAPPING_TARGET, target):
            raise InputError(f'"{target}" is no place in a command.', where=where, remedy=f"Write {key}= and {PLACES}.")
        if key in found or target in found.values():
            raise InputError("key or target is mapped twice.", where=where, remedy="Leave one of the two out.")
        found[key] = target
    return found


def _as_found(command: Sequence[str], folder: Path) -> list[str]:
    # With the path of its program, unless that is in ZeroTune's own environment: the words in a study's record then
    # mean the same in another shell.
    words = list(command)
    position = 0
    assigned: dict[str, str] = {}
    while position < len(words) and (ASSIGNMENT.match(words[position]) or words[position] == "env"):
        name, _, value = words[position].partition("=")
        assigned[name] = value
        position += 1
    if is_environment_from(words[position:]):
        # What runs there is found there.
        return words
    launcher = launcher_of(words[position:])
    if launcher is not None and launcher.runs_command:
        # The shell's PATH also finds the program that the launcher starts.
        position = next((at for at, word in enumerate(words) if at > position and _is_python(word)), position)
    if position == len(words) or os.sep in words[position]:
        return words
    program = words[position]
    found = shutil.which(program, path=assigned.get("PATH", os.environ.get("PATH")))
    if found is None or not _is_python(program):
        return words
    path = folder / found
    is_own = os.path.realpath(path.parent) == os.path.realpath(Path(sys.executable).parent)
    if not (is_own and program in python_programs()):
        words[position] = str(path)
    return words


def _is_python(program: str) -> bool:
    return program in python_programs() or re.fullmatch(r"python3\.\d+", program) is not None


def _ranks(entrypoint: Entrypoint, host: Host) -> int:
    slots = entrypoint.slots
    if slots is None:
        return 1
    if isinstance(slots, int):
        return slots
    kind = kind_of(host.device)
    if slots == "memory_nodes" and kind.computes_on_the_processor:
        return min(_memory_nodes(), len(host.slots))
    if slots in ("cpu", "gpu") and slots != kind.word:
        raise InputError(
            f"the launcher is asked for ranks on every {slots.upper()}, and this host has {host.device} slots.",
            where=_WHERE,
            remedy="Ask for a number, or for auto.",
        )
    return len(host.slots)


def _memory_nodes() -> int:
    if os.environ.get("LOCAL_SIZE", "0").isdecimal() and int(os.environ.get("LOCAL_SIZE", "0")) > 0:
        return int(os.environ["LOCAL_SIZE"])
    try:
        shown = subprocess.run(["numactl", "--hardware"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return 1
    return max(1, len(set(re.findall(r"^node \d+ cpus: (\d.*)$", shown, re.MULTILINE))))


# The same experiment on other numbers of ranks, as a plan has it.

# Of DeepSpeed's launcher, torchrun and Accelerate: how many ranks they start.
_RANKS_OPTIONS = ("--num_gpus", "--num_accelerators", "--nproc_per_node", "--nproc-per-node", "--num_processes")


def on_ranks(experiment: Experiment, count: int) -> Experiment:
    """The experiment on a number of ranks of one host."""
    resources = experiment.config.resources.model_copy(update={"slots_per_trial": count, "hosts": {}})
    return replace(experiment, config=experiment.config.model_copy(update={"resources": resources}))


def started_on(experiment: Experiment, count: int, hosts: int) -> Experiment:
    """The experiment with a launcher that starts a rank for each of some devices of one host.

    Words that start ranks on several hosts stay as they were typed. So do words that do not have the number, and those
    that choose devices, because another number of ranks could not start on them.
    """
    typed = experiment.entrypoint
    if _names_devices(typed) or VARIABLE in typed.environment:
        return experiment
    if not typed.launcher or typed.slots == count or hosts > 1 or typed.hosts:
        return experiment
    words = list(typed.launcher)
    named = [index for index, word in enumerate(words) if word.partition("=")[0] in _RANKS_OPTIONS]
    if len(named) != 1:
        return experiment
    name, is_joined, _ = words[named[0]].partition("=")
    words[named[0] : named[0] + 2 - bool(is_joined)] = [f"{name}={count}"] if is_joined else [name, str(count)]
    entrypoint = typed.model_copy(update={"launcher": tuple(words), "slots": count})
    return replace(experiment, entrypoint=entrypoint)
