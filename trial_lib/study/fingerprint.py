"""The fingerprint of an experiment: its code, configuration, hardware and versions, and their changes."""

import contextlib
import hashlib
import logging
import os
import stat
import threading
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import psutil
from pydantic import Field

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.config import keys_without_effect
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.folders import StudyPaths
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.knobs import get_knob, leaves
from zerotune.trial_lib.study.folder import read_record_file
from zerotune.trial_lib.study.setup import StudySetup

SECTIONS = ("code", "configuration", "environment", "model", "hardware", "versions", "measuring", "search")

# How a trial's figure comes about: all samples over all time by the clock, on other data in each confirming round.
# Whoever changes that counts on, and studies before are no longer compared with those after.
_MEASURING = "2"

# What says how a search goes about it, and not which configurations it may find.
_SEARCH = ("method", "settings", "max_trials", "max_minutes", "random_seed")
# Names of files that hold programs and configurations. Data, logs and checkpoints have others, with some exceptions.
_SUFFIXES = frozenset(
    {".py", ".pyx", ".json", ".yaml", ".yml", ".toml", ".cfg", ".ini", ".sh", ".jinja"}
    | {".cu", ".cuh", ".cpp", ".cc", ".c", ".h", ".hpp"}
)
# Of text files only these are code. Others hold the output of a program, `tee` or a shell.
_TEXTS = ("requirements", "constraints", "CMakeLists")
_MOST_BYTES = 2**20  # what is larger is data, whatever it is called
_MOST_ENTRIES = 2000  # of a folder; one with more holds data
_MOST_FILES = 20_000  # of code, of one folder: that many are hashed in seconds
# Folders that trainings, tools and ZeroTune itself leave beside the code.
_LEFT_BEHIND = ("zerotune-", "mlruns", "mlartifacts", "wandb", "runs", "logs", "lightning_logs", "checkpoint", "output")
_NO_CODE = frozenset({"__pycache__", "node_modules", "site-packages", "build", "dist"})
# Variables of libraries that decide how fast a training is.
_VARIABLES = (
    *("OMP_", "MKL_", "KMP_AFFINITY", "KMP_BLOCKTIME", "NCCL_", "GLOO_", "CUDA_", "CUBLAS_", "TORCH_", "PYTORCH_"),
    *("TRITON_", "DS_"),
)
_NOT_SPEED = ("CUDA_VISIBLE_DEVICES", "CUDA_HOME", "TORCH_HOME", "TRITON_CACHE_DIR", "DS_ACCELERATOR")
_MOST_SAID = 8  # changes or edits, in a sentence


class Fingerprint(FrozenRecord):
    """An experiment at the time of one study, in sections."""

    # A hash of each file of code in the model directory and of the included files
    code: dict[str, str] = Field(default_factory=dict)
    # The values of the YAML and of the DeepSpeed configuration, without secrets
    configuration: dict[str, str] = Field(default_factory=dict)
    # Variables of the ranks that decide how fast libraries are
    environment: dict[str, str] = Field(default_factory=dict)
    model: dict[str, str] = Field(default_factory=dict)  # sizes that the profile trial found; empty before it
    hardware: dict[str, str] = Field(default_factory=dict)  # the devices, their memory and driver, and the processor
    # Of python, torch, deepspeed and others, from the profile trial; empty before it
    versions: dict[str, str] = Field(default_factory=dict)
    measuring: dict[str, str] = Field(default_factory=dict)  # ZeroTune's way; empty in records of earlier versions
    search: dict[str, str] = Field(default_factory=dict)  # the settings that decide how thorough the search is
    # Whether the study was resumed after a change, so that its trials are of several experiments
    is_mixed: bool = False

    @property
    def is_cut_off(self) -> bool:
        """Whether there may be more code than was hashed."""
        return len(self.code) >= _MOST_FILES

    def with_profile(self, profiled: TrialResult) -> "Fingerprint":
        model = {} if profiled.profile is None else _model(profiled.profile)
        return self.model_copy(update={"versions": profiled.versions, "model": model})

    def changed_since(self, earlier: "Fingerprint") -> list[str]:
        """The names of the sections that differ."""
        return [section for section in SECTIONS if getattr(self, section) != getattr(earlier, section)]

    def changes_since(self, earlier: "Fingerprint") -> list[str]:
        """The changes in a few words each, such as `torch 2.6.0 -> 2.7.0`. Further ones are counted."""
        changes = [
            said
            for section in self.changed_since(earlier)
            for said in _changes(section, getattr(earlier, section), getattr(self, section))
        ]
        left = len(changes) - _MOST_SAID
        return changes if left < 2 else [*changes[:_MOST_SAID], f"and {left} more"]


def _changes(section: str, before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    names = [name for name in sorted(before.keys() | now.keys()) if before.get(name) != now.get(name)]
    if section == "code":
        said = {name: "new" if name not in before else "gone" if name not in now else "edited" for name in names}
        return [f"{name} ({how})" for name, how in said.items()]
    return [f"{name} {before.get(name, 'not set')} -> {now.get(name, 'not set')}" for name in names]


def fingerprint_of(setup: StudySetup) -> Fingerprint:
    """The fingerprint of an experiment before its first trial."""
    experiment, arguments = setup.experiment, setup.arguments
    code = dict(islice(_hashes(experiment.model_dir), _MOST_FILES))
    for path in arguments.include:
        hashes = islice(_hashes(path.resolve()), _MOST_FILES)
        code |= {_included_name(path, name): hashed for name, hashed in hashes}
    return Fingerprint(
        code=code,
        configuration={**_submitted(experiment), **_flat(redact(experiment.ds_config), "deepspeed.")},
        environment={
            name: value
            for name, value in redact(setup.environment).items()
            if name.startswith(_VARIABLES) and name not in _NOT_SPEED
        },
        hardware=_hardware(setup.host),
        measuring={"ZeroTune's way to measure": _MEASURING},
        search=_flat({name: getattr(arguments, name) for name in _SEARCH}, ""),
    )


def code_file(name: str, model_dir: Path, include: Sequence[Path]) -> Path:
    """The file of a name in a fingerprint's code. Included ones go before the model directory's of the same name."""
    for path in reversed(include):
        within = name.removeprefix(path.name).lstrip("/")
        file = path.resolve() / within
        if name == _included_name(path, within) and file.is_file():
            return file
    return model_dir / name


def _included_name(path: Path, within: str) -> str:
    return f"{path.name}/{within}".rstrip("/")


def fingerprint_in(paths: StudyPaths) -> Fingerprint:
    """The fingerprint of a study at its opening; an empty one if its version kept none."""
    try:
        return read_record_file(paths.fingerprint, Fingerprint, "the study's fingerprint", "Restore it, or remove it.")
    except FileNotFoundError:
        return Fingerprint()


def _submitted(experiment: Experiment) -> dict[str, str]:
    # The values of the YAML, without those that are only for people and without DeepSpeed's.
    config = experiment.config.model_dump(mode="json", exclude_none=True, exclude={"name", "description", "labels"})
    config["hyperparameters"].pop("deepspeed_config", None)
    data = experiment.document.data
    config |= {key: get_knob(data, key) for key in keys_without_effect(data)}
    # A secret may also be elsewhere, without a name that gives it away.
    secrets = KnownSecrets.of_experiment(experiment)
    return {name: secrets.hide(value) for name, value in _flat(redact(config), "").items()}


def _hashes(root: Path) -> Iterator[tuple[str, str]]:
    if root.is_file():
        yield "", file_hash(root)
        return
    for folder, folders, names in os.walk(root):
        if len(folders) + len(names) > _MOST_ENTRIES:
            folders.clear()
            continue
        folders[:] = sorted(name for name in folders if not _is_left_out(Path(folder, name)))
        for name in sorted(names):
            path = Path(folder, name)
            if _is_code(path) and _is_small_file(path):
                yield path.relative_to(root).as_posix(), file_hash(path)


def _is_left_out(folder: Path) -> bool:
    name = folder.name
    is_hidden = name.startswith(".") or name in _NO_CODE or name.startswith(_LEFT_BEHIND)
    return is_hidden or (folder / "pyvenv.cfg").exists()


def _is_code(path: Path) -> bool:
    is_text = path.suffix == ".txt" and path.name.startswith(_TEXTS)
    return (path.suffix in _SUFFIXES or is_text) and not path.name.startswith(".")


def _is_small_file(path: Path) -> bool:
    try:
        found = path.stat()
    except OSError:
        return False
    # Reading a pipe would wait for a writer. A file that this process writes to is no code, whatever its name.
    is_own_output = any(os.path.samestat(found, own) for own in _own_output())
    return stat.S_ISREG(found.st_mode) and found.st_size <= _MOST_BYTES and not is_own_output


def _own_output() -> list[os.stat_result]:
    # The files of standard output and standard error, if they are open.
    found = []
    for number in (1, 2):
        with contextlib.suppress(OSError):
            found.append(os.fstat(number))
    return found


def file_hash(path: Path) -> str:
    """A hash of a file's content, or why it cannot be read."""
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16]
    except OSError as error:
        # The study does not fail because of it. A file that becomes readable counts as changed.
        return type(error).__name__


def _hardware(host: Host) -> dict[str, str]:
    found = {
        "device": host.device,
        "slots": str(len(host.slots)),
        # The memory that a system leaves differs by some pages from boot to boot.
        "memory of a slot (GiB)": f"{host.memory_per_slot / 2**30:.1f}",
        "processor": _processor(),
        "cores": str(psutil.cpu_count() or 0),
    }
    return {**found, **kind_of(host.device).identity(host)}


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ""
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _model(profile: ModelProfile) -> dict[str, str]:
    return {
        "parameters": f"{profile.num_params:,}",
        "trainable parameters": f"{profile.trainable_num_params:,}",
        "model replicas": str(profile.data_parallel_size),
        "pipeline": str(profile.pipeline_parallel),
    }


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    return {path: str(value) for path, value in leaves(values, prefix)}


# Edits while a study runs: each trial starts from the files as they are at that time


class Edits:
    """Notices edits of the code and of the experiment's file. It looks at sizes and times before each trial."""

    def __init__(self, experiment: Experiment, include: Sequence[Path], paths: StudyPaths, log: logging.Logger) -> None:
        self._paths = paths
        self._log = log
        self._begun = fingerprint_in(paths)
        self._config = experiment.path if experiment.path not in (None, paths.experiment) else None
        named = {name: code_file(name, experiment.model_dir, include) for name in self._begun.code}
        self._files = {name: path for name, path in named.items() if not _is_same(path, self._config)}
        self._hashes = dict(self._begun.code)
        # A file without a fingerprint counts from the study's opening.
        for path in filter(None, (self._config, _config_elsewhere(experiment))):
            self._files[str(path)] = path
            self._hashes[str(path)] = file_hash(path)
        self._seen = {name: _signature(path) for name, path in self._files.items()}
        self._lock = threading.Lock()
        self._told: dict[str, str] = {}

    @property
    def sentence(self) -> str:
        """The edited files; empty if there are none."""
        if not self._told:
            return ""
        names = list(self._told.values())
        more = f" and {len(names) - _MOST_SAID} more" if len(names) > _MOST_SAID else ""
        return f"Edited while the study ran: {', '.join(names[:_MOST_SAID])}{more}."

    def so_far(self) -> str:
        """Looks once more. The study has failed, perhaps because it cannot be written."""
        with contextlib.suppress(OSError):
            self.look()
        return self.sentence

    def look(self) -> None:
        """Logs the edits since the last look. It may be called from any thread."""
        with self._lock:
            now = {name: _signature(path) for name, path in self._files.items()}
            touched = [name for name, signature in now.items() if signature != self._seen[name]]
            self._seen = now
            edited = [
                name
                for name in touched
                if name not in self._told and file_hash(self._files[name]) != self._hashes[name]
            ]
            for name in edited:
                self._told[name] = f"{name} (gone)" if now[name] is None else name
                self._tell(name)
            if any(self._files[name] != self._config for name in edited):
                self._mix()

    def _tell(self, name: str) -> None:
        if self._files[name] == self._config:
            self._log.warning(
                "%s was edited while the study runs. The study continues with the file as it was at its start.", name
            )
        else:
            self._log.warning(
                "%s was edited while the study runs. Earlier trials were measured before the edit, so results may not "
                "be comparable. Start a new study to be safe.",
                self._told[name],
            )

    def _mix(self) -> None:
        # Marks the study's fingerprint, so that later studies learn nothing from it.
        mixed: Fingerprint = self._begun.model_copy(update={"is_mixed": True})
        write_whole(self._paths.fingerprint, mixed.model_dump_json(indent=2))


def _is_same(path: Path, other: Path | None) -> bool:
    return other is not None and path.name == other.name and path.resolve() == other.resolve()


def _config_elsewhere(experiment: Experiment) -> Path | None:
    # The file of the DeepSpeed configuration if it is outside the code. A fingerprint has the code.
    source = experiment.config_source
    is_elsewhere = source.is_file() and not source.resolve().is_relative_to(experiment.model_dir)
    return None if not is_elsewhere or _is_same(source, experiment.path) else source


def _signature(path: Path) -> Mapping[str, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return {"size": found.st_size, "time": found.st_mtime_ns, "file": found.st_ino}
