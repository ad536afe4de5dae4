"""Reads an experiment: its fields, the DeepSpeed configuration that they name, and the entrypoint.

It imports neither torch nor DeepSpeed, so that a mistake is reported in a fraction of a second.
"""

import ast
import contextlib
import difflib
import importlib.util
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from zerotune.trial_lib.deepspeed_config.overrides import (
    DEEPSPEED_KEYS,
    MICRO_BATCH,
    inline_ds_config,
    is_programs_own_name,
    overwrite_deepspeed_config,
    read_deepspeed_json,
    read_named_config,
)
from zerotune.trial_lib.inputs.config import ExperimentConfig, keys_without_effect
from zerotune.trial_lib.inputs.entrypoint import (
    Entrypoint,
    default_interpreter,
    parse_entrypoint,
    split_flag,
    with_config,
)
from zerotune.trial_lib.inputs.places import batch_places
from zerotune.trial_lib.inputs.program_code import module_file
from zerotune.trial_lib.inputs.search_space import check_switches, read_search_space, refuse_launchers_own
from zerotune.trial_lib.inputs.yaml_document import YamlDocument, YamlSection, describe, read_yaml, written_yaml
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.search.arms import RequestedKnob

# The mistakes that pydantic finds in an experiment's YAML, as sentences with line and column.

Location = tuple[str | int, ...]


def explain(document: YamlDocument, error: ValidationError) -> list[InputError]:
    """Returns one error for each place that `ExperimentConfig` refuses, in their order in the document."""
    # A field of several types has several complaints. The deepest one is the most precise.
    by_place: dict[Location, list[ErrorDetails]] = {}
    for complaint in error.errors(include_url=False):
        by_place.setdefault(_in_document(document.data, complaint["loc"]), []).append(complaint)
    errors = [
        _explain_one(document, place, complaints)
        for place, complaints in by_place.items()
        if not any(other[: len(place)] == place and place and other != place for other in by_place)
    ]
    # By line and column.
    return sorted(errors, key=lambda error: [int(part) for part in error.where.rsplit(":", 2)[1:]])


def refuse_a_programs_own(document: YamlDocument) -> None:
    """Refuses a file of settings that a program reads itself, such as one of GPT-NeoX. It is no experiment.
    Raises InputError: DeepSpeed's keys are at the top level, with dashes or underscores, and there is no experiment.
    """
    if {"entrypoint", "hyperparameters"} & document.data.keys():
        return
    found = [str(key) for key in document.data if str(key).replace("-", "_") in DEEPSPEED_KEYS]
    if found:
        raise InputError(
            f"this is a file of your program's own, with DeepSpeed's settings in it ({', '.join(found[:3])}), and no "
            "experiment.",
            where=document.where((found[0],), key=True),
            remedy="Put `zerotune tune --` before the command that reads it, such as `zerotune tune -- python deepy.py "
            f"train.py {document.path.name}`.",
        )


def one_error(errors: Sequence[InputError], path: Path) -> InputError:
    """Returns one error that lists all of them; a single one unchanged."""
    if len(errors) == 1:
        return errors[0]
    listed = "\n".join(f"  {error}" for error in errors)
    return InputError(f"{len(errors)} mistakes:\n{listed}\n", where=str(path), remedy="Mend each of them.")


def _in_document(data: Any, loc: Location) -> Location:
    # The part of pydantic's location that is in the document. The rest names types and validators.
    place: list[str | int] = []
    for step in loc:
        known = step in data if isinstance(data, dict) else isinstance(data, list) and step in range(len(data))
        if known:
            data = data[step]
            place.append(step)
    return tuple(place)


def _explain_one(document: YamlDocument, place: Location, complaints: list[ErrorDetails]) -> InputError:
    first = complaints[0]
    kind, name = first["type"], ".".join(str(step) for step in place)
    at_key = kind == "extra_forbidden" or first["loc"][-1:] == ("[key]",)
    where = document.where(place, key=at_key)
    if kind == "extra_forbidden":
        return InputError(f'unknown key "{name}".', where=where, remedy=_where_it_belongs(place))
    if kind == "missing":  # of the required fields there is one
        return InputError('"entrypoint" is missing.', where=where, remedy="Add it: `entrypoint: python3 train.py`.")
    if "remedy" in first.get("ctx", {}):
        return InputError(f"{name}: {first['msg']}.", where=where, remedy=first["ctx"]["remedy"])
    if kind == "value_error":
        what = str(first["ctx"]["error"])
        return InputError(f"{name}: {what}." if name else f"{what}.", where=where, remedy="Change it.")
    expected = " or ".join(dict.fromkeys(_expected(complaint) for complaint in complaints))
    found = place[-1] if at_key else first["input"]
    as_text = "text" in expected and isinstance(found, (bool, int, float))
    what = f"{name}: expected {expected}, found {describe(found)}."
    return InputError(what, where=where, remedy="Put it in quotes." if as_text else "Change it.")


_EXPECTED = {
    "string_type": "text",
    "int_type": "a whole number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a mapping",
    "byte_size": "a size such as 2 GiB",
    "byte_size_unit": "a size such as 2 GiB",
    "string_pattern_mismatch": "a flag such as --batch-size or the name of an environment variable",
    "recursion_loop": "a value that does not hold itself",
    "invalid-json-value": "text, a number, true, false, a list or a mapping",
}


def _expected(complaint: ErrorDetails) -> str:
    kind, context = complaint["type"], complaint.get("ctx", {})
    if kind == "literal_error":
        return str(context["expected"])
    if kind == "greater_than":
        return f"more than {context['gt']}"
    if kind == "greater_than_equal":
        return f"at least {context['ge']}"
    return _EXPECTED.get(kind, complaint["msg"])


def _where_it_belongs(place: Location) -> str:
    key, known = str(place[-1]), _keys(_section(place[:-1]))
    nearest = difflib.get_close_matches(key, known, n=1)
    if nearest:
        return f'Did you mean "{nearest[0]}"?'
    if len(place) > 1 and key in _keys(ExperimentConfig):
        return "It belongs at the top level."
    owner = next((name for name in ExperimentConfig.model_fields if key in _keys(_section((name,)))), None)
    if owner is not None:
        return f'It belongs under "{owner}".'
    return f"Known here: {', '.join(known)}. Values of your own stand under hyperparameters."


def _keys(section: type[BaseModel]) -> list[str]:
    return [*section.model_fields, *(section.not_used if issubclass(section, YamlSection) else ())]


def _section(place: Location) -> type[BaseModel]:
    # The model of the section at a place; one without fields for a plain value.
    section: type[BaseModel] = ExperimentConfig
    for step in place:
        annotation = section.model_fields[str(step)].annotation
        kinds = [annotation, *get_args(annotation)]
        kinds += [inner for kind in kinds for inner in get_args(kind)]
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, BaseModel)), BaseModel)
    return section


T = TypeVar("T")
_TELLING_KEYS = {"zero_optimization", MICRO_BATCH}


@dataclass(frozen=True)
class Experiment:
    document: YamlDocument  # its fields as they were written. Those of a typed command are as a YAML would have them.
    model_dir: Path  # the folder that the entrypoint runs in, absolute
    config: ExperimentConfig  # its fields
    # The user's DeepSpeed configuration, with their `overwrite_deepspeed_args` merged in. Empty if nothing names one,
    # because the code has it or the training needs none.
    ds_config: dict[str, Any]
    entrypoint: Entrypoint  # the parsed command
    requests: tuple[RequestedKnob, ...]  # what `search_space` asks for
    # Sentences on the parts without effect: one on the keys of the YAML, and one for each part of the command
    notes: tuple[str, ...]

    @property
    def path(self) -> Path | None:
        """The YAML file, absolute; None for a typed command."""
        return None if self.document.root is None else self.document.path.resolve()

    @property
    def text(self) -> str:
        """The YAML. That of a typed command is for its study's folder."""
        return self.document.text or written_yaml(
            self.document.data, "Written by zerotune from the command that was typed."
        )

    @property
    def name(self) -> str:
        return self.config.name or self.model_dir.name

    @property
    def source(self) -> str:
        return str(self.path or self.document.path)

    @property
    def config_source(self) -> Path:
        """The file that has the DeepSpeed configuration, possibly the YAML itself."""
        named = self.config.hyperparameters.deepspeed_config or next(iter(self.entrypoint.config_values), None)
        if isinstance(named, str) and _is_file(self.model_dir / named):
            return self.model_dir / named
        return Path(self.source)

    @property
    def environment_variables(self) -> dict[str, str]:
        """The user's variables of every rank's environment. An assignment in the entrypoint wins."""
        return {**self.config.environment.environment_variables, **self.entrypoint.environment}


def read_experiment(
    source: Path | YamlDocument,
    model_dir: Path,
    *,
    include: Sequence[Path] = (),
    needs_ds_config: bool = True,
    wrapper: Sequence[str] = (),
) -> Experiment:
    """`source` is a file, or the fields that stand for a typed command. `include` are files and folders that the code
    imports from outside the model directory. `wrapper` are the words that the user typed, if they start the entrypoint
    from the same folder. A search of a trial class starts from a DeepSpeed configuration, so it `needs_ds_config`; a
    script may have one in its code.
    Raises InputError: they have mistakes. One error lists all of them.
    """
    document = read_yaml(source) if isinstance(source, Path) else source
    if not os.path.isdir(model_dir):  # noqa: PTH112 Path.is_dir raises for a folder that may not be entered
        what = "this is a file, not a directory." if _is_file(model_dir) else "the model directory does not exist."
        raise InputError(what, where=str(model_dir), remedy="Name the folder that holds your training code.")
    model_dir = model_dir.resolve()
    refuse_a_programs_own(document)
    try:
        config = ExperimentConfig.model_validate(document.data)
    except ValidationError as error:
        raise one_error(explain(document, error), document.path) from None

    errors: list[InputError] = []
    folders = [model_dir, *(path.resolve().parent for path in include)]
    entrypoint = _collect(errors, lambda: _read_entrypoint(document, config, folders))
    ds_config = _collect(
        errors, lambda: _read_deepspeed_config(document, config, entrypoint, model_dir, needs_ds_config)
    )
    requests = _collect(errors, lambda: read_search_space(config.search_space, document.where))
    if ds_config is None or entrypoint is None or requests is None:
        raise one_error(errors[::-1], document.path)
    unused = keys_without_effect(document.data)
    experiment = Experiment(
        document=document,
        model_dir=model_dir,
        config=config,
        ds_config=ds_config,
        entrypoint=entrypoint.model_copy(update={"wrapper": tuple(wrapper)}),
        requests=requests,
        notes=(
            *([f"{', '.join(unused)} {'has' if len(unused) == 1 else 'have'} no effect here."] if unused else []),
            *entrypoint.notes,
            *([] if ds_config else _note_names(entrypoint, model_dir)),
        ),
    )
    variables = {**os.environ, **experiment.environment_variables}
    # A mapping to a missing place is an error now, not in the first trial.
    refuse_launchers_own(config.arg_mappings.values(), entrypoint)
    batch_places(entrypoint.arguments, variables, config.arg_mappings, model_dir, wrapper)
    check_switches(requests, entrypoint, variables, config.arg_mappings, model_dir)
    return experiment


def _note_names(entrypoint: Entrypoint, model_dir: Path) -> list[str]:
    # A sentence on each configuration that only the program can find.
    return [
        f"{value} is no file here, so your program decides which DeepSpeed configuration it names. ZeroTune takes the "
        "one that the engine gets."
        for value in dict.fromkeys(entrypoint.config_values)
        if is_programs_own_name(value, model_dir, entrypoint.script)
    ]


def _collect(errors: list[InputError], check: Callable[[], T]) -> T | None:
    try:
        return check()
    except InputError as error:
        errors.append(error)
        return None


def _read_deepspeed_config(
    document: YamlDocument, config: ExperimentConfig, entrypoint: Entrypoint | None, model_dir: Path, is_needed: bool
) -> dict[str, Any]:
    hyperparameters = config.hyperparameters
    base: Any = hyperparameters.deepspeed_config
    overwrites = hyperparameters.overwrite_deepspeed_args
    if base is None:
        typo = difflib.get_close_matches("deepspeed_config", hyperparameters.model_extra or {}, n=1)
        if entrypoint is None or not entrypoint.trial_class:
            # A script may have hyperparameters of its own, such as `ds_config`, that mean something to it alone.
            typo = [name for name in typo if name.startswith("deepspeed")]
        inline = inline_ds_config(hyperparameters.as_dict())
        if inline is not None and not typo:
            return overwrite_deepspeed_config(inline, overwrites)
        # A script may have it in its code. A class gets the search's by the hyperparameters.
        if not typo and not (is_needed and entrypoint is not None and entrypoint.trial_class):
            base = _config_of_command(entrypoint, model_dir, document.where(("entrypoint",))) if entrypoint else {}
            return overwrite_deepspeed_config(base, overwrites) if base else {}
        raise InputError(
            "the experiment names no DeepSpeed configuration, but a search starts from one.",
            where=document.where(("hyperparameters",), key=True),
            remedy=f'Did you mean "deepspeed_config" by "{typo[0]}"?'
            if typo
            else "Add `deepspeed_config: ds_config.json` under `hyperparameters`, with the name of your file.",
        )
    if isinstance(base, str):
        try:
            base = read_deepspeed_json(model_dir / base)
        except InputError as error:
            place = document.where(("hyperparameters", "deepspeed_config"))
            raise InputError(error.what, where=error.where, remedy=f"{error.remedy} It is named at {place}.") from None
    return overwrite_deepspeed_config(base, overwrites)


def _config_of_command(entrypoint: Entrypoint, model_dir: Path, where: str) -> dict[str, Any]:
    # The DeepSpeed configuration that a command names; an empty one if it names none.
    named = list(dict.fromkeys(entrypoint.config_values))
    if len(named) > 1:
        what = f"the command names two DeepSpeed configurations, {named[0]} and {named[1]}."
        raise InputError(what, where=where, remedy="Name one.")
    if not named or is_programs_own_name(named[0], model_dir, entrypoint.script):
        return {}
    return read_named_config(named[0], model_dir, where=where)


def _read_entrypoint(document: YamlDocument, config: ExperimentConfig, folders: Sequence[Path]) -> Entrypoint:
    model_dir = folders[0]
    where = document.where(("entrypoint",))
    place = str(model_dir) if config.follow_launcher else f"the model directory {model_dir}"
    base = config.hyperparameters.deepspeed_config or inline_ds_config(config.hyperparameters.as_dict())
    named = base if isinstance(base, str) else None
    shell = {**os.environ, **config.environment.environment_variables} if config.follow_launcher else None
    entrypoint = parse_entrypoint(config.entrypoint, deepspeed_config=named, where=where, folder=model_dir, shell=shell)
    if config.follow_launcher and base is None and not entrypoint.config_values:
        entrypoint = with_config(entrypoint, _found_config(entrypoint, model_dir))
    _refuse_another_config(entrypoint, base, model_dir, where)
    if entrypoint.interpreter is not None and not _is_file(model_dir / entrypoint.interpreter):
        remedy = f"Name an existing one, absolute or relative to {model_dir}, or write python3 for ZeroTune's own."
        raise InputError(f"the interpreter {entrypoint.interpreter} does not exist.", where=where, remedy=remedy)
    if entrypoint.script is not None and not _is_file(model_dir / entrypoint.script):
        raise InputError(
            f"the script {entrypoint.script} is not in {place}.",
            where=where,
            remedy="Name an existing one, or run zerotune in the folder that holds it."
            if config.follow_launcher
            else "Name a script relative to the model directory, or pass the directory that holds it.",
        )
    if entrypoint.trial_class is not None:
        _refuse_missing_class(entrypoint, entrypoint.trial_class, folders, where)
    if entrypoint.module is not None and not (
        module_file(entrypoint.module, folders, "__main__.py") or _may_be_installed(entrypoint, entrypoint.module)
    ):
        what = f"the module {entrypoint.module} is neither in {place} nor installed."
        raise InputError(what, where=where, remedy="Name a module that `python3 -m` finds from the model directory.")
    return entrypoint


def _found_config(entrypoint: Entrypoint, model_dir: Path) -> str | None:
    """Returns the one argument that names a DeepSpeed configuration by a flag of the script's own; None without one.

    The keys of the file show that it is one. No other JSON has such keys.
    """
    found: set[str] = set()
    for argument in entrypoint.arguments:
        _, value = split_flag(argument)
        if not value.endswith(".json") or not _is_file(model_dir / value):
            continue
        with contextlib.suppress(InputError):
            if not _TELLING_KEYS.isdisjoint(read_deepspeed_json(model_dir / value)):
                found.add(value)
    return found.pop() if len(found) == 1 else None


def _refuse_another_config(
    entrypoint: Entrypoint, base: str | Mapping[str, Any] | None, model_dir: Path, where: str
) -> None:
    # Refuses a second configuration: the trial's is made from one file and replaces the other.
    for value in entrypoint.config_values:
        if isinstance(base, str) and os.path.realpath(model_dir / value) != os.path.realpath(model_dir / base):
            raise InputError(
                f"the entrypoint names the DeepSpeed configuration {value}, and hyperparameters.deepspeed_config "
                f"names {base}.",
                where=where,
                remedy="Name the same file in both places.",
            )
        if isinstance(base, Mapping):
            raise InputError(
                f"the entrypoint names the DeepSpeed configuration {value}, and hyperparameters.deepspeed_config holds "
                "another one.",
                where=where,
                remedy=f"Write `deepspeed_config: {value}`.",
            )


def _may_be_installed(entrypoint: Entrypoint, module: str) -> bool:
    # Only another interpreter itself could list its packages.
    is_another = entrypoint.interpreter is not None or default_interpreter() != sys.executable
    return is_another or importlib.util.find_spec(module.partition(".")[0]) is not None


def _refuse_missing_class(entrypoint: Entrypoint, name: str, folders: Sequence[Path], where: str) -> None:
    # Refuses a trial class whose module is missing or binds no such name. The module is read, not imported.
    module, _, class_name = name.partition(":")
    file = module_file(module, folders)
    if file is None:
        if _may_be_installed(entrypoint, module):
            return
        raise InputError(
            f"the module {module} of the trial class {name} is neither in the model directory {folders[0]} nor "
            "installed.",
            where=where,
            remedy=f"Put it in {module.replace('.', '/')}.py, or pass the directory that holds it.",
        )
    try:
        names = _bound_names(ast.parse(file.read_bytes()))
    except (SyntaxError, ValueError) as error:
        line = getattr(error, "lineno", None)
        what = f"this is not Python ({error})."
        raise InputError(what, where=f"{file}:{line or 1}", remedy="Correct it: the trial class is there.") from None
    if names is not None and class_name not in names:
        near = difflib.get_close_matches(class_name, names, n=1)
        remedy = f"Did you mean {module}:{near[0]}?" if near else "Name a DeepSpeedTrial class of that module."
        raise InputError(f"{file} has no {class_name}.", where=where, remedy=remedy)


def _bound_names(tree: ast.Module) -> set[str] | None:
    # The names that a module binds; None if only running it shows them (`from x import *`).
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                if alias.name == "*":
                    return None
                names.add(alias.asname or alias.name.partition(".")[0])
    return names


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name too long for a file, a folder that may not be entered
        return False
