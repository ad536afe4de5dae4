"""The answer in the user's own command and files: the places where what the winner changes stands, and their edits."""

import contextlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path, PurePath
from typing import Any, TypeVar

from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    TRAINING_ARGUMENTS,
    difference,
    named_alike,
    with_open_batch,
)
from zerotune.trial_lib.inputs.documents import (
    REMOVED,
    SUFFIXES,
    Key,
    edited,
    leaves,
    read_document,
    value_at,
    with_whole_paths,
)
from zerotune.trial_lib.inputs.entrypoint import Entrypoint, split_flag
from zerotune.trial_lib.inputs.places import (
    FileTarget,
    is_plain_name,
    is_variable,
    typed_as,
    with_switch,
    with_target,
    without_option,
)
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import read_bounded
from zerotune.trial_lib.messages.turned import in_command
from zerotune.trial_lib.rank.batch_source import found_in, numbers_in_words
from zerotune.trial_lib.records.folders import FileChange, OwnCommand, StudyPaths, shown_in
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.switches import SwitchValue, deepspeed_part, text_of
from zerotune.trial_lib.search.knobs import STAGE, get_knob
from zerotune.trial_lib.search.knobs import leaves as settings_in
from zerotune.trial_lib.study.program import KnownProgram

# How programs and their files name a setting: names that mean it, then names that may.
_NAMES = {
    MICRO_BATCH: (r"(per_(device|gpu)_train|micro|mbs)", r"(batch|ims_per|(^|[-_])(bs|bsz)($|[-_]))"),
    ACCUMULATION: (r"(accum\w*_(steps|grad)|grad\w*_accum)", r"(accum|(^|[-_])gas($|[-_]))"),
    STAGE: (r"^zero_?(optimization_)?stage$", r"^((ds|deepspeed)_)?(stage|zero)$"),
}
_NOT_TRAINED = re.compile(r"eval|valid|test|infer|pred|rollout|generat|global|total|num_batches", re.IGNORECASE)
# A configuration of DeepSpeed's has one of these at its top.
_OF_DEEPSPEED = ("zero_optimization", MICRO_BATCH)
# Accelerate's names of settings in its own file, in the section `deepspeed_config`, and as options of its launcher.
_OF_ACCELERATE = {
    STAGE: "zero_stage",
    ACCUMULATION: "gradient_accumulation_steps",
    "gradient_clipping": "gradient_clipping",
    "zero_optimization.offload_optimizer.device": "offload_optimizer_device",
    "zero_optimization.offload_param.device": "offload_param_device",
}
# Settings of that section that Accelerate reads beside a DeepSpeed configuration file. It refuses the others there.
_BESIDE_A_FILE = (
    *("zero3_init_flag", "deepspeed_hostfile", "deepspeed_multinode_launcher", "deepspeed_moe_layer_cls_names"),
)
# The arguments of Lightning's DeepSpeedStrategy that have the name of DeepSpeed's key, and its names of strategies
_OF_LIGHTNING = tuple(
    f"zero_optimization.{name}"
    for name in (
        *("stage", "contiguous_gradients", "overlap_comm", "allgather_partitions", "reduce_scatter"),
        *("allgather_bucket_size", "reduce_bucket_size", "sub_group_size"),
    )
)
_LIGHTNINGS_NAME = re.compile(r"deepspeed(_stage_[123])?")
_STRATEGY = "lightning.pytorch.strategies.DeepSpeedStrategy"
# The configuration that Hydra has composed, in the place of a file's path. Overrides change it.
_HYDRA = Path("hydra")
_DEFAULT = re.compile(r"\$\{(\w+):?[-=](\w+)\}")  # of a variable of the shell
_INTERPOLATION = re.compile(r"\$\{([\w.]+)\}")
_SECTION, _MIXED_PRECISION = "deepspeed_config", "mixed_precision"
_BATCH = (MICRO_BATCH, ACCUMULATION, TRAIN_BATCH)
_LARGEST = 1_000_000  # characters of a file that may have a place
_LONGEST_NAME = 1000
_NEW_CONFIG = "<new>"  # stands for the path of a new configuration
# Ways to have an answer in the command, each of which costs a start of the program if those before it were wrong
_MOST_WAYS = 4
_Any = TypeVar("_Any")


class NoPlaceError(Exception):
    """A setting stands at no place in the command and its files. The text is a clause that names it."""


@dataclass(frozen=True)
class _File:
    # A file that the command names, or another file of it.
    path: Path
    is_found_by_folder: bool  # another word names the folder that the path is relative to
    text: str
    content: Any
    named_at: tuple[Path, Key] | None = None  # where another file has its path


# The place of a value: a key of a file, or a place among the words.
_Spot = tuple[Path, Key] | str


@dataclass
class _Edits:
    words: list[str]
    folder: Path
    files: list[_File]
    own: dict[Path, dict[Key, Any]] = field(default_factory=dict)  # values in the user's files
    variables: dict[str, str] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    # Which of the places that may hold a setting is meant, and how many there are
    picks: Mapping[str, int] = field(default_factory=dict)
    choices: dict[str, int] = field(default_factory=dict)
    new_config: str | None = None  # the text of a new DeepSpeed configuration
    config: Path | None = None  # the file with the user's own
    placed: set[str] = field(default_factory=set)  # the sizes of the batch that have been set in a configuration

    def pick(self, what: str, found: Iterable[_Any]) -> _Any | None:
        places = list(dict.fromkeys(found))[:_MOST_WAYS]
        self.choices[what] = max(1, len(places))
        return places[min(self.picks.get(what, 0), len(places) - 1)] if places else None

    def put(self, path: Path, key: Key, value: Any) -> None:
        content: Any = next((file.content for file in self.files if file.path == path), {})
        for _ in key:
            # A value may stand for another one.
            if refers := _INTERPOLATION.fullmatch(str(value_at(content, key))):
                key = tuple(refers[1].split("."))
        if path != _HYDRA:
            self.own.setdefault(path, {})[key] = value
            return
        name, before = ".".join(key), value_at(content, key)
        if value is REMOVED:
            # Hydra wants the value that it removes.
            self.words = with_target(f"~{name}", self.words, _as_override(before))[0]
        else:
            is_plain = typed_as(name, self.words) or (before is not None and len(key) > 1)
            self.words = with_target(name if is_plain else f"++{name}", self.words, _as_override(value))[0]

    def put_at(self, spot: "_Spot", value: Any) -> None:
        if isinstance(spot, str):
            self.put_word(spot, value)
        else:
            self.put(*spot, value)

    def put_word(self, place: str, value: SwitchValue) -> None:
        # At an option, an override, a variable, or in a file that the words name.
        target = FileTarget.read(place)
        if target is not None:
            self.put((self.folder / target.path).resolve(), target.keys, value)
        elif is_variable(place, self.words):
            self.variables[place] = text_of(value, os.environ.get(place, ""))
        else:
            self.words = with_switch(place, self.words, value)[0]


def own_commands(
    experiment: Experiment,
    words: Sequence[str],
    known: KnownProgram,
    config: Mapping[str, Any],
    values: "OtherValues",
    paths: StudyPaths,
) -> Iterator[OwnCommand]:
    """The user's command, whose words are given, with a complete configuration and other values of the program.

    Yields the ways to have them there, the likeliest first. Several places may have a setting's name and value, and
    which of them the program follows shows only when the command runs. Another ZeRO stage may change the name of a
    preset (`zero2`), or what the program makes of it. Nothing is written. Raises NoPlaceError if something that the
    configuration changes has no place in the command, and InputError if a file cannot be edited.
    """
    edits = _edits(experiment, words, known, config, values, {})
    ways = [_written(edits, paths, experiment.model_dir)]
    yield ways[0]
    for picked in sorted(product(*map(range, edits.choices.values())), key=sum):
        picks = dict(zip(edits.choices, picked, strict=True))
        with contextlib.suppress(NoPlaceError, InputError):
            way = _written(_edits(experiment, words, known, config, values, picks), paths, experiment.model_dir)
            if len(ways) < _MOST_WAYS and way not in ways:
                ways.append(way)
                yield way


def _edits(
    experiment: Experiment,
    words: Sequence[str],
    known: KnownProgram,
    config: Mapping[str, Any],
    values: "OtherValues",
    picks: Mapping[str, int],
) -> _Edits:
    folder = experiment.model_dir
    typed = {**_defaults(words, folder), **os.environ, **experiment.environment_variables}
    edits = _Edits(list(words), folder, _named_files(words, folder), environment=typed, picks=picks)
    if known.found is not None and known.found.hydra_config:
        edits.files.append(_File(_HYDRA, False, "", known.found.hydra_config))
    base = deepspeed_part(known.base_config)
    # The sizes are there whether they differ or not.
    changed = {
        key: value
        for key, value in settings_in(difference(base, config))
        if value != get_knob(base, key) and not (value is None and get_knob(base, f"{key}.device") == "none")
    }
    written = with_open_batch(known.in_file(config), known.own_config(experiment))
    _place_config(edits, experiment.entrypoint, known, written, changed)
    _place_batch(edits, known, config, changed)
    for place, value in in_command(values.switches).items():
        if value is not None:
            edits.put_word(place, value)
    _place_options(edits, known, values)
    return edits


@dataclass(frozen=True)
class OtherValues:
    """What the winner changes beside the DeepSpeed configuration."""

    switches: Mapping[str, SwitchValue] = field(default_factory=dict)  # of the program, by their places
    options: Mapping[str, str] = field(default_factory=dict)  # of a Trainer
    removed: Sequence[str] = ()  # options of a Trainer that it refuses with these


def _place_options(edits: _Edits, known: KnownProgram, values: OtherValues) -> None:
    # A Trainer's options stand beside its batch: in a file, or among the words.
    beside = None if MICRO_BATCH in known.arg_mappings else _beside_sibling(edits, MICRO_BATCH, known)
    for option, value in values.options.items():
        if beside is None:
            edits.words = with_switch(option, edits.words, value)[0]
        else:
            path, key = beside
            edits.put(path, (*key[:-1], option.lstrip("-")), read_document(value, ".yaml"))
    for option in values.removed:
        if beside is None:
            edits.words = without_option(option, edits.words)
        else:
            edits.put(beside[0], (*beside[1][:-1], option.lstrip("-")), REMOVED)


# The files that the words name, and the files that those name.


def _named_files(words: Sequence[str], folder: Path) -> list[_File]:
    folders = [folder, *(folder / word for word in words if word and os.path.isdir(folder / word))]  # noqa: PTH112
    found: dict[Path, _File] = {}
    for word in words:
        for name in dict.fromkeys((word, word.partition("=")[2])):
            if PurePath(name).suffix not in SUFFIXES:
                continue
            for parent in folders:
                path = (parent / name).resolve()
                if path not in found and (file := _file(path, parent != folder)) is not None:
                    found[path] = file
    files = list(found.values())
    for file in files:
        for key, value in leaves(file.content):
            if not isinstance(value, str) or PurePath(value).suffix not in SUFFIXES or len(value) > _LONGEST_NAME:
                continue
            for path in ((parent / value).resolve() for parent in (folder, file.path.parent)):
                if path not in found and (named := _file(path, True, (file.path, key))) is not None:
                    found[path] = named
                    files.append(named)
    return files


def _file(path: Path, by_folder: bool, named_at: tuple[Path, Key] | None = None) -> _File | None:
    try:
        text = read_bounded(path, _LARGEST) if path.is_file() else ""
        content = read_document(text, path.name)
    except (OSError, ValueError):
        return None
    return _File(path, by_folder, text, content, named_at) if isinstance(content, dict) else None


def _defaults(words: Sequence[str], folder: Path) -> dict[str, str]:
    # The variables of shell scripts among the words, with the values that they have if nothing sets them.
    scripts = [folder / word for word in words if PurePath(word).suffix in (".sh", ".bash")]
    return dict(pair for path in scripts if path.is_file() for pair in _DEFAULT.findall(read_bounded(path, _LARGEST)))


def _as_override(value: Any) -> str:
    return "null" if value is None else text_of(value)


def _is_of_deepspeed(content: Any) -> bool:
    return isinstance(content, Mapping) and any(name in content for name in _OF_DEEPSPEED)


# The DeepSpeed configuration: a file, a section of a file, Accelerate's own settings, a name, or text in a word.


def _place_config(
    edits: _Edits, entrypoint: Entrypoint, known: KnownProgram, written: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    # The position of the word that is the configuration, or its name.
    begin, of_config = len(edits.words) - len(entrypoint.arguments), entrypoint.config_positions
    is_typed = begin >= 0 and tuple(edits.words[begin:]) == entrypoint.arguments and len(of_config) == 1
    position = begin + of_config[0] if is_typed else None
    word = "" if position is None else split_flag(edits.words[position])[1]
    held = edits.pick("configuration", _configs_held(edits, word))
    if held is not None:
        edits.config = held[0]
        _edit_config(edits, *held, known, written, changed)
        return
    others = [path for path in changed if path not in _BATCH]
    if position is not None:
        before, value = split_flag(edits.words[position])
        # As JSON, in base64, or as a file in the place of a name that only the program knows.
        alike = named_alike(value, written, Path(_NEW_CONFIG))
        own_stage = get_knob(known.base_config, STAGE) or 0
        preset = ""
        if others == [STAGE] and alike == _NEW_CONFIG:
            # A preset of another stage may have more that is other.
            named = re.sub(rf"(zero[-_]?(?:stage)?[-_]?){own_stage}(?!\d)", rf"\g<1>{changed[STAGE]}", value)
            preset = edits.pick("preset", (each for each in (named, "") if each != value)) or ""
        if preset:
            edits.words[position] = f"{before}{preset}"
        elif others or alike != _NEW_CONFIG:
            edits.words[position] = f"{before}{alike}"
            edits.new_config = json.dumps(written, indent=2) + "\n"
        return
    of_accelerate = (
        file
        for file in edits.files
        if file.content.get("distributed_type") == "DEEPSPEED" or isinstance(file.content.get(_SECTION), Mapping)
    )
    accelerates = next(of_accelerate, None)
    if accelerates is not None:
        _edit_accelerates(edits, accelerates, changed, others, written)
    elif others and all(path in _OF_ACCELERATE and _option(edits, path) for path in others):
        for path in (*others, *([ACCUMULATION] if ACCUMULATION in changed and _option(edits, ACCUMULATION) else [])):
            edits.put_word(f"--{_OF_ACCELERATE[path]}", changed[path])
    elif known.found is not None and known.found.by_lightning and set(others) <= set(_OF_LIGHTNING):
        _edit_lightnings(edits, known, changed, others)
    else:
        # A dictionary that the code makes of its options, or of its own file.
        for path in (path for path in others if path not in known.arg_mappings):
            own = get_knob(known.base_config, path) or (0 if path == STAGE else None)
            spot = edits.pick(path, _by_name(edits, path, own))
            if spot is None:
                raise NoPlaceError(f"{path} stands in the code, or where ZeroTune does not see it")
            edits.put_at(spot, changed[path])


def _configs_held(edits: _Edits, word: str) -> Iterator[tuple[Path, Key]]:
    # The files that have a configuration, each with its section. That of the word of the configuration is the first.
    named = (edits.folder / word).resolve()
    for file in sorted(edits.files, key=lambda file: file.path != named):
        for key, section in _sections(file.content):
            if _is_of_deepspeed(section):
                yield file.path, key
                break


def _sections(content: Mapping[str, Any], key: Key = ()) -> Iterator[tuple[Key, Mapping[str, Any]]]:
    # Those above before those within.
    yield key, content
    for name, inner in content.items():
        if isinstance(inner, Mapping):
            yield from _sections(inner, (*key, str(name)))


def _edit_config(
    edits: _Edits, path: Path, section: Key, known: KnownProgram, written: Mapping[str, Any], changed: Mapping[str, Any]
) -> None:
    content = value_at(next(file.content for file in edits.files if file.path == path), section)
    for name, value in changed.items():
        if name not in _BATCH:
            edits.put(path, (*section, *name.split(".")), REMOVED if value is None else value)
    by_program = {} if known.found is None else known.found.batch
    if known.found is not None and known.found.by_lightning:
        return  # It refuses the accumulation there, and takes the micro-batch from the loader.
    own = known.in_words(known.base_config)
    for name in (MICRO_BATCH, ACCUMULATION):
        elsewhere = name in by_program or name in known.arg_mappings or _by_name(edits, name, own.get(name))
        if content.get(name) == "auto" or (name not in content and elsewhere):
            continue
        if name in changed or written.get(name) != content.get(name, written.get(name)):
            edits.put(path, (*section, name), written[name])
            edits.placed.add(name)
    before, total = known.in_file(known.base_config), content.get(TRAIN_BATCH)
    if type(total) is int:
        samples = total * written[MICRO_BATCH] * written[ACCUMULATION]
        total = samples // (before[MICRO_BATCH] * before[ACCUMULATION])
        if total != content[TRAIN_BATCH]:
            edits.put(path, (*section, TRAIN_BATCH), total)


def _option(edits: _Edits, path: str) -> bool:
    return bool(typed_as(f"--{_OF_ACCELERATE[path]}", edits.words))


def _edit_accelerates(
    edits: _Edits, file: _File, changed: Mapping[str, Any], others: Sequence[str], written: Mapping[str, Any]
) -> None:
    section = file.content.get(_SECTION) or {}
    if set(others) <= _OF_ACCELERATE.keys():
        for path in (*others, ACCUMULATION):
            name = _OF_ACCELERATE[path]
            if path in changed and (path != ACCUMULATION or name in section):
                edits.put(file.path, (_SECTION, name), "none" if changed[path] is None else changed[path])
        return
    # Accelerate takes all of it from one file, or none.
    edits.new_config = json.dumps(written, indent=2) + "\n"
    edits.put(file.path, (_SECTION, "deepspeed_config_file"), _NEW_CONFIG)
    for name in section:
        if name not in _BESIDE_A_FILE:
            edits.put(file.path, (_SECTION, name), REMOVED)
    edits.put(file.path, (_MIXED_PRECISION,), REMOVED)


def _edit_lightnings(edits: _Edits, known: KnownProgram, changed: Mapping[str, Any], others: Sequence[str]) -> None:
    # Arguments of the strategy, in a file or among the options; or the strategy's name.
    if not others:
        return
    spot = edits.pick(STAGE, _by_name(edits, STAGE, get_knob(known.base_config, STAGE)))
    kept = ((file.path, key, value) for file in edits.files for key, value in leaves(file.content))
    named = [(path, key) for path, key, name in kept if key[-1] == "strategy" and _LIGHTNINGS_NAME.fullmatch(str(name))]
    if spot is not None:
        for name in others:
            last = name.rpartition(".")[2]
            if isinstance(spot, str):
                option = f"{spot.rpartition('.')[0]}.{last}"
                edits.words = with_target(option, edits.words, text_of(changed[name]))[0]
            else:
                edits.put(spot[0], (*spot[1][:-1], last), changed[name])
    elif named and others == [STAGE] and changed[STAGE]:
        edits.put(*named[0], f"deepspeed_stage_{changed[STAGE]}")
    elif named:
        stage = {"stage": get_knob(known.base_config, STAGE)}
        set_ = {name.rpartition(".")[2]: changed[name] for name in others}
        edits.put(*named[0], {"class_path": _STRATEGY, "init_args": stage | set_})
    else:
        raise NoPlaceError(f"{others[0]} stands in the code, or where ZeroTune does not see it")


# The batch: an option, a variable, or a key of a file.


def _place_batch(edits: _Edits, known: KnownProgram, config: Mapping[str, Any], changed: Mapping[str, Any]) -> None:
    own, new = known.in_words(known.base_config), known.in_words(config)
    by_trainer = {} if known.found is None or MICRO_BATCH not in known.found.batch else known.found.batch
    for key, target in known.arg_mappings.items():
        if key in changed and (value := get_knob(new, key)) is not None:
            # A script may start the program with an option of its own, whatever stands behind the script's name.
            others = () if typed_as(target, edits.words) else _by_name(edits, key, own.get(key))
            edits.put_at(edits.pick(key, (target, *others)) or target, value)
    for key in (MICRO_BATCH, ACCUMULATION):
        if key not in changed or key in known.arg_mappings:
            continue
        is_in_config = edits.new_config is not None or key in edits.placed
        if is_in_config and key not in by_trainer:
            continue
        spot = edits.pick(key, _by_name(edits, key, own.get(key))) or _beside_sibling(edits, key, known)
        if spot is None:
            name = TRAINING_ARGUMENTS[key] if key in by_trainer else key
            raise NoPlaceError(f"{name} stands in the code, or where ZeroTune does not see it")
        edits.put_at(spot, new[key])


def suspected_places(
    ignored: TrialResult, size: int, entrypoint: Entrypoint, environment: Mapping[str, str], folder: Path
) -> list[tuple[str, str]]:
    """The keys and places, as `--map` has them, from which a program may have a batch size that it has not followed.

    A rank has found one (of the run that has `ignored` it), or they are in the command, its variables, its files, or in
    what Hydra has composed. The likeliest is first.
    """
    by_rank = found_in(ignored.reason)
    # DeepSpeed's own file follows each trial. A wrapper may make it of the file that it is given.
    files = [file for file in _named_files(entrypoint.arguments, folder) if not _is_of_deepspeed(file.content)]
    files = _named_files(entrypoint.wrapper, folder) or files
    if ignored.program is not None:
        files.append(_File(_HYDRA, False, "", ignored.program.hydra_config))
    edits = _Edits(list(entrypoint.arguments), folder, files, environment=environment)
    found = [] if by_rank is None else [by_rank]
    for spot in _by_name(edits, MICRO_BATCH, size):
        if isinstance(spot, str):
            found.append((MICRO_BATCH, spot))
            continue
        if spot[0] == _HYDRA:
            found.append((MICRO_BATCH, "++" * (len(spot[1]) == 1) + ".".join(spot[1])))
            continue
        file = next(file for file in files if file.path == spot[0])
        is_new = value_at(file.content, spot[1]) is None
        target = FileTarget(os.path.relpath(file.path, folder.resolve()), f"{'+' * is_new}{'.'.join(spot[1])}")
        if FileTarget.read(str(target)) is not None:
            found.append((MICRO_BATCH, str(target)))
    return list(dict.fromkeys(found))[:_MOST_WAYS]


def _by_name(edits: _Edits, setting: str, value: Any) -> list[_Spot]:
    # The places that have a setting's value by a name that means it, then those whose name may mean it.
    found: list[tuple[int, bool, int, _Spot]] = []
    places: list[tuple[Key, Any, _Spot]] = [
        ((number.name.lstrip("-"),), number.value, number.target) for number in numbers_in_words(edits.words)
    ]
    places += [((name,), own, name) for name, own in edits.environment.items() if is_plain_name(name)]
    for file in edits.files:
        if file.path != edits.config or file.path == _HYDRA:
            places += [(key, own, (_reader(edits, file), key)) for key, own in leaves(file.content)]
    patterns = _NAMES.get(setting, (rf"^{setting.rpartition('.')[2]}$",))
    for key, own, spot in places:
        if own is None or str(own) != str(value) or _NOT_TRAINED.search(".".join(key)):
            continue
        name = key[-1].rpartition(".")[2].replace("-", "_")
        is_other = setting == MICRO_BATCH and "accum" in name.lower()
        ranks = [rank for rank, pattern in enumerate(patterns) if re.search(pattern, name, re.IGNORECASE)]
        if ranks and not is_other:
            # A variable of that name may be another program's.
            found.append((ranks[0], spot in edits.environment, len(key), spot))
    return [spot for *_, spot in sorted(found, key=lambda each: each[:3])]


def _reader(edits: _Edits, file: _File) -> Path:
    # The file of the command that reads this one, as a base on which it sets keys of its own.
    while file.named_at is not None:
        file = next(each for each in edits.files if each.path == file.named_at[0])
    return file.path


def _beside_sibling(edits: _Edits, key: str, known: KnownProgram) -> tuple[Path, Key] | None:
    # Where the other arguments of the Trainer, or of Lightning's, stand, if this one was left to its default.
    siblings, name = (*TRAINING_ARGUMENTS.values(), "output_dir"), TRAINING_ARGUMENTS[key]
    if known.found is not None and known.found.by_lightning and key == ACCUMULATION:
        siblings, name = ("strategy", "devices", "max_steps", "max_epochs"), "accumulate_grad_batches"
    elif known.found is None or not {MICRO_BATCH, key} <= known.found.batch.keys():
        return None
    for file in (file for file in edits.files if file.path != edits.config):
        for found, _ in leaves(file.content):
            if found[-1] in siblings:
                return file.path, (*found[:-1], name)
    return None


# The command with edited copies of its files, and the user's own files with the same edits.


def _written(edits: _Edits, paths: StudyPaths, folder: Path) -> OwnCommand:
    texts = {file.path: file.text for file in edits.files}
    for path in edits.own:
        if path not in texts:
            texts[path] = read_bounded(path, _LARGEST)
    named_at = {file.path: file.named_at for file in edits.files if file.named_at is not None}
    copied = list(edits.own)
    for path in copied:
        if path in named_at and named_at[path][0] not in copied:
            copied.append(named_at[path][0])
    names: dict[Path, Path] = {}
    for path in sorted(copied):
        is_taken = any(each.name == path.name for each in names.values())
        names[path] = paths.best / (f"{len(names)}_{path.name}" if is_taken else path.name)
    in_copies = {path: dict(edits.own.get(path, {})) for path in copied}
    for path in (path for path in copied if path in named_at):
        # A path may be meant from the folder of the file that has it.
        in_copies[named_at[path][0]][named_at[path][1]] = str(names[path])
    copies = {}
    changes = []
    new_path, own_path = (parent / f"ds_config.{paths.root.name}.json" for parent in (paths.best, folder))
    if edits.new_config is not None:
        copies[str(new_path)] = edits.new_config
        changes.append(FileChange(path=str(own_path), before=None, after=edits.new_config))
    for path in sorted(copied):
        elsewhere = with_whole_paths(texts[path], path, folder)
        copies[str(names[path])] = edited(elsewhere, path.name, _naming(in_copies[path], shown_in(new_path, folder)))
        after = edited(texts[path], path.name, _naming(edits.own.get(path, {}), shown_in(own_path, folder)))
        if after != texts[path]:
            changes.append(FileChange(path=str(path), before=texts[path], after=after))
    applied, words = list(edits.words), list(edits.words)
    for position, word in enumerate(edits.words):
        before, value = split_flag(word)
        if edits.new_config is not None and value == _NEW_CONFIG:
            words[position], applied[position] = (before + shown_in(each, folder) for each in (new_path, own_path))
    for file in edits.files:
        if file.path not in names:
            continue
        copy, target = names[file.path], FileTarget(os.path.relpath(file.path, folder.resolve()), "")
        for position, before in target.positions(edits.words, folder.resolve()):
            is_whole = file.is_found_by_folder or Path(words[position].removeprefix(before)).is_absolute()
            words[position] = before + (str(copy) if is_whole else shown_in(copy, folder))
    return OwnCommand(
        folder=str(folder),
        words=tuple(words),
        variables=edits.variables,
        copies=copies,
        changes=tuple(changes),
        applied=tuple(applied),
    )


def _naming(changes: Mapping[Key, Any], path: str) -> dict[Key, Any]:
    return {key: path if value == _NEW_CONFIG else value for key, value in changes.items()}
