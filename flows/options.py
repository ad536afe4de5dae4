"""Flags made from the fields of a record. Their names, types, defaults and help equal those of Prefect's form."""

import inspect
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

import click
from pydantic import BaseModel, ValidationError
from pydantic_core import PydanticUndefined

from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.plan.plan_record import PlanArguments
from zerotune.trial_lib.records.candidate import NameOf
from zerotune.trial_lib.records.result import SEARCH_METRICS
from zerotune.trial_lib.search.methods import METHODS, Method, SearchSettings
from zerotune.trial_lib.study.arguments import BATCH_POLICY, StudyArguments

Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_NAME = re.compile(r"    (\w+): ")
# A description ends with this if it describes the default of a field whose value is None.
_OTHERWISE = re.compile(r"(.*) Default: (.*)\.", re.DOTALL)


def option(model: type[BaseModel], field: str, *flags: str, default: str | None = None, more: str = "") -> Decorator:
    """Returns the flag of one field, which the record's docstring describes. Without spellings it is its name.

    `default` is shown in the help if the record computes it.
    """
    description = descriptions(model)[field]
    parted = _OTHERWISE.fullmatch(description)
    said, otherwise = (description, "") if parted is None else (parted[1], parted[2])
    help_text, told_default = f"{said} {more}".rstrip(), default or otherwise
    owner = next(each for each in model.__mro__ if field in inspect.get_annotations(each))
    options, value = _kind_of(inspect.get_annotations(owner)[field]), model.model_fields[field].default
    if told_default:
        help_text += f"  [default: {told_default}]"
    elif value not in (None, PydanticUndefined, ()) and not options.get("is_flag"):
        options |= {"default": value, "show_default": True}
    names = flags or (f"--{field.replace('_', '-')}",)
    return click.option(*names, field, help=help_text, **options)


def descriptions(model: type[BaseModel]) -> Mapping[str, str]:
    """Returns the description of each field, from the docstrings of a record and of its base classes."""
    found: dict[str, str] = {}
    for each in reversed(model.__mro__):
        lines = (inspect.getdoc(each) or "").partition("Attributes:\n")[2].splitlines()
        name = ""
        for line in lines:
            named = _NAME.match(line)
            if named:
                name = named[1]
                found[name] = line[named.end() :]
            elif name and line.strip():
                found[name] += f" {line.strip()}"
    return {name: f"{text[0].upper()}{text[1:].rstrip('.')}." for name, text in found.items()}


def _kind_of(annotation: Any) -> dict[str, Any]:
    if get_origin(annotation) is Annotated:
        inner, *metadata = get_args(annotation)
        names = next((each for each in metadata if isinstance(each, NameOf)), None)
        return {"type": click.Choice(list(names.table))} if names is not None else _kind_of(inner)
    if get_origin(annotation) in (Union, UnionType):
        return _kind_of(next(each for each in get_args(annotation) if each is not NoneType))
    if get_origin(annotation) is Literal:
        values = get_args(annotation)
        numbers = [value for value in values if isinstance(value, int)]
        return {"type": click.IntRange(min(numbers), max(numbers)) if numbers else click.Choice(values)}
    if get_origin(annotation) is tuple:
        return {**_kind_of(get_args(annotation)[0]), "multiple": True}
    if annotation is bool:
        return {"is_flag": True}
    return {"type": click.Path(path_type=Path) if annotation is Path else annotation}


# The arguments and flags of the commands. Most flags are made from the records that they fill.

EXPERIMENT: list[Decorator] = [
    click.argument("config_path", type=click.Path(path_type=Path)),
    click.argument("model_dir", type=click.Path(path_type=Path)),
]
_MAP: Decorator = click.option(
    "--map",
    "mappings",
    multiple=True,
    metavar="KEY=TARGET",
    help="Say what sets a DeepSpeed key in your command, such as train_micro_batch_size_per_gpu=--batch-size. TARGET "
    "is an option, a variable (BATCH), an override (trainer.batch), a value in a file (conf.yaml:trainer.batch) or a "
    "word by its number (argv:2). You can repeat this option.",
)
_VARY: Decorator = click.option(
    "--vary",
    "varied",
    multiple=True,
    metavar="PLACE=VALUES",
    help="Vary a setting of your program together with DeepSpeed's, such as '--gradient_checkpointing=true,false' or "
    "OMP_NUM_THREADS=1,2. PLACE is what TARGET is in --map. With true and false an option is there or left out. You "
    "can repeat this option.",
)
JSON: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output."
)


_of_study, _of_plan = partial(option, StudyArguments), partial(option, PlanArguments)
_zero_stages = partial(_of_study, "zero_stages", "-z", "--zero-stages")
_UNITS = f"The metrics are {', '.join(f'{metric.name} in {metric.unit}' for metric in SEARCH_METRICS.values())}."
INCLUDE = _of_study("include", "-i", "--include")
_MAX_TRIALS = _of_study("max_trials", "-mt", "--max-trials")
_MAX_SLOTS = _of_study("max_slots", "-ms", "--max-slots")
_MAX_MICRO_BATCH = _of_study("max_micro_batch")
_WINDOW = [_of_study("start_profile_step"), _of_study("end_profile_step")]
_START = _of_study("start")
_OPTIONS: list[Decorator] = [
    INCLUDE,
    _MAX_TRIALS,
    _of_study("max_minutes"),
    _MAX_SLOTS,
    _MAX_MICRO_BATCH,
    _of_study("max_concurrent_trials", "-mct", "--max-concurrent-trials"),
    _of_study("metric", "-m", "--metric", more=_UNITS),
    *map(_of_study, ("beside", "from_earlier", "plan", "run_full_experiment")),
    _of_study("ray_address", "--ray"),
    *_WINDOW,
    _of_study("random_seed", "-r", "--random-seed"),
    _of_study("max_search_runner_restarts"),
    _START,
    JSON,
]
_BATCH_POLICY = [_of_study(field) for field in BATCH_POLICY]


def _stages_of_methods() -> str:
    # Which stages each method searches, such as `adaptive: 0 1 2 3; asha, binary: 1 2 3`.
    methods = [method for method in METHODS.values() if method.confirms_winner]
    named = {stages: [each.name for each in methods if each.stages == stages] for stages in {m.stages for m in methods}}
    return "; ".join(f"{', '.join(names)}: {_numbers(stages)}" for stages, names in sorted(named.items()))


def _numbers(stages: tuple[int, ...]) -> str:
    return " ".join(map(str, stages))


def tune_options() -> list[Decorator]:
    method = click.option(
        "--method",
        type=click.Choice([method.name for method in METHODS.values() if method.confirms_winner]),
        default=StudyArguments.model_fields["method"].default,
        show_default=True,
        help="Search with this method and its default settings. `zerotune METHOD --help` shows them.",
    )
    return [method, _MAP, _VARY, _zero_stages(default=_stages_of_methods()), *_OPTIONS, *_BATCH_POLICY]


MICRO_BATCH_OPTIONS: list[Decorator] = [_MAP, _MAX_TRIALS, _MAX_SLOTS, _MAX_MICRO_BATCH, *_WINDOW, _START, JSON]


def method_options(method: Method) -> list[Decorator]:
    policy = _BATCH_POLICY if method.has_batch_policy else []
    known = {*SearchSettings.model_fields, *StudyArguments.model_fields}
    own = [option(method.settings, field) for field in method.settings.model_fields if field not in known]
    return [*EXPERIMENT, _zero_stages(default=_numbers(method.stages)), *_OPTIONS, *policy, *own]


def with_options(command: Callable[..., None], options: list[Decorator]) -> Callable[..., None]:
    for each in reversed(options):
        command = each(command)
    return command


ESTIMATE_OPTIONS: list[Decorator] = [*EXPERIMENT, INCLUDE, _MAX_MICRO_BATCH, _of_study("memory_headroom"), JSON]


PLAN_OPTIONS: list[Decorator] = [
    click.argument("config_path", required=False, type=click.Path(path_type=Path)),
    click.argument("model_dir", required=False, type=click.Path(path_type=Path)),
    *map(_of_plan, ("model", "on", "price", "prices", "whole", "within", "devices")),
    _MAP,
    _VARY,
    _of_plan("zero_stages", "-z", "--zero-stages", default="0 1 2 3"),
    *map(_of_plan, ("train_batch_size", "free_batch", "layouts", "max_micro_batch", "memory_headroom")),
    *map(_of_plan, ("deadline", "max_processes")),
    _of_plan("include", "-i", "--include"),
    JSON,
]

TRAIN_OPTIONS: list[Decorator] = [
    *EXPERIMENT,
    click.option(
        "--ds-config",
        type=click.Path(path_type=Path),
        help="Merge this DeepSpeed configuration, such as a study's best_ds_config.json, into that of the experiment.",
    ),
    INCLUDE,
    click.option(
        "--resume",
        is_flag=True,
        help="Resume the newest full experiment of this name, in this folder, that has not reached its end.",
    ),
    JSON,
]


# How the commands are read and listed: by section, lists with spaces or commas, a training command behind `--`.

LONGEST_LINE = 45  # characters that the line of a command may have
_FIRST = {"tune": "-- deepspeed train.py", "show": "", "resume": "STUDY"}


class Section(str, Enum):
    TUNE = "Tune"
    TRAIN = "Train"
    SERVERS = "Servers"
    METHODS = "Search methods and tables"


class Command(click.Command):
    """A command. The first sentence of its help is its line in the list of all commands."""

    def __init__(self, *arguments: Any, section: Section, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.section = section

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self.spread(args))

    def spread(self, args: list[str]) -> list[str]:
        return spread_lists(args, self.params)


class TypedCommand(Command):
    """A command that takes a training command, word for word, behind `--`. It arrives as `typed`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own, typed = list(args), []
        if "--" in args:
            position = args.index("--")
            own, typed = args[:position], args[position + 1 :]
        has_model = any(word.partition("=")[0] == "--model" for word in own)
        if not typed and not has_model and not set(own) & set(ctx.help_option_names):
            missing = "Nothing follows `--`." if "--" in args else "There is no `--` with a command behind it."
            remedy = f"Write what you start your training with: `{ctx.command_path} -- deepspeed train.py ARGUMENTS`."
            raise click.UsageError(f"{missing} {remedy}", ctx)
        remaining = super().parse_args(ctx, own)
        ctx.params["typed"] = tuple(typed)
        return remaining


class TypedOrReadCommand(TypedCommand):
    """A command that takes a training command behind `--`, or an experiment's YAML and its folder.

    A word after a flag is never the flag's second value, because it may be the YAML.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        own = args[: args.index("--")] if "--" in args else args
        if "--" in args or set(own) & set(ctx.help_option_names):
            remaining = super().parse_args(ctx, args)
            if ctx.params.get("config_path") is not None:
                extra = f"`{ctx.params['config_path']}` stands before `--`, so there are two things to plan."
                raise click.UsageError(f"{extra} Leave one of them out.", ctx)
            return remaining
        remaining = Command.parse_args(self, ctx, own)
        if ctx.params.get("model") is not None and ctx.params.get("config_path") is None:
            ctx.params["typed"] = ()
            return remaining
        if ctx.params.get("config_path") is None or ctx.params.get("model_dir") is None:
            raise click.UsageError(
                f"There is no training to look at. Write `{ctx.command_path} -- deepspeed train.py ARGUMENTS`, or "
                f"`{ctx.command_path} CONFIG_PATH MODEL_DIR`.",
                ctx,
            )
        ctx.params["typed"] = ()
        return remaining

    def spread(self, args: list[str]) -> list[str]:
        return spread_lists(args, [param for param in self.params if _is_value_list(param)])


class Commands(click.Group):
    command_class = Command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        width = max(map(len, self.commands))
        for section in Section:
            commands = [command for command in self.commands.values() if command.section == section]
            with formatter.section(section.value):
                formatter.write_dl([(f"{command.name:{width}}", line_of(command)) for command in commands])

    def first_steps(self) -> str:
        """Returns what `zerotune` alone prints: what it is, and three commands to begin with."""
        formatter = click.HelpFormatter()
        formatter.write_text("ZeroTune finds the DeepSpeed configuration that trains your model fastest.")
        steps = [(f"zerotune {name} {words}".rstrip(), line_of(self.commands[name])) for name, words in _FIRST.items()]
        with formatter.section("Three commands to begin with"):
            formatter.write_dl(steps, col_max=40)
        formatter.write_paragraph()
        formatter.write_text("`zerotune --help` lists all commands.")
        return formatter.getvalue().rstrip()


def line_of(command: click.Command) -> str:
    """Returns the line of a command in a list: the first sentence of its help, without its full stop."""
    return command.get_short_help_str(limit=LONGEST_LINE + 1).rstrip(".")


def spread_lists(words: Sequence[str], params: Sequence[click.Parameter]) -> list[str]:
    """Returns words with `-z 1 2` and `-z 1,2` written as `-z 1 -z 2`, which click understands.

    The lists of Determined's `dsat` are separated by spaces. A file's name may contain a comma, and is not split.
    """
    lists = {flag: param for param in params if getattr(param, "multiple", False) for flag in param.opts}
    spread: list[str] = []
    remaining = list(words)
    while remaining:
        word = remaining.pop(0)
        flag, is_joined, joined = word.partition("=")
        if flag not in lists or (is_joined and not _is_value_list(lists[flag])):
            spread.append(word)
            continue
        values = [joined] if is_joined else []
        while not is_joined and remaining and _belongs(remaining[0], lists[flag]):
            values.append(remaining.pop(0))
        if _is_value_list(lists[flag]):
            values = [part for value in values for part in value.split(",") if part]
        if not values:
            spread.append(word)
        for value in values:
            spread += [flag, value]
    return spread


def _is_value_list(param: click.Parameter) -> bool:
    return isinstance(param.type, click.types.IntParamType | click.Choice)


def _belongs(word: str, param: click.Parameter) -> bool:
    if isinstance(param.type, click.Choice):
        return set(word.split(",")) <= set(param.type.choices)
    return word.replace(",", "").isdigit() if _is_value_list(param) else not word.startswith("-")


# The parameters of a flow: the same fields, in Prefect's form and in a run.

_ArgumentsT = TypeVar("_ArgumentsT", bound=BaseModel)
_Function = Callable[..., Any]


def shows(model: type[BaseModel], derived: Collection[str] = ()) -> Callable[[_Function], _Function]:
    """Replaces `**arguments` in a function's signature by the fields of a record, so that these are written down once.

    The form leaves fields in `derived` empty: their default depends on other fields.
    """

    def with_fields(function: _Function) -> _Function:
        own = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=_shown(parameter))
            for parameter in inspect.signature(function).parameters.values()
            if parameter.kind is not inspect.Parameter.VAR_KEYWORD
        ]
        fields = [_parameter(model, name, name in derived) for name in model.model_fields]
        function.__signature__ = inspect.Signature([*fields, *own])  # type: ignore[attr-defined]
        described = (inspect.getdoc(model) or "").partition("Attributes:\n")[2]
        function.__doc__ = f"{inspect.getdoc(function)}\n{described}"
        return function

    return with_fields


def _parameter(model: type[BaseModel], name: str, is_derived: bool) -> inspect.Parameter:
    # The parameter of one field. A required field is optional here, because a resumed run has its record.
    field = model.model_fields[name]
    # The annotation has metadata, such as limits.
    annotation = model.__annotations__[name]
    if field.is_required() or is_derived:
        annotation, default = annotation | None, None
    else:
        default = field.get_default(call_default_factory=True)
    parameter = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
    return parameter.replace(annotation=_shown(parameter))


def _shown(parameter: inspect.Parameter) -> Any:
    # The annotation of a parameter, for Prefect's form.
    return Annotated[parameter.annotation, _MayBeLeftOut()] if parameter.default is None else parameter.annotation


@dataclass(frozen=True)
class _MayBeLeftOut:
    """An optional parameter, whose box in Prefect's form is just empty. Else the form has a switch "None" there."""

    def __get_pydantic_json_schema__(self, schema: Any, handler: Callable[[Any], Any]) -> Any:
        found = handler(schema)
        kinds = [kind for kind in found.get("anyOf", ()) if kind.get("type") != "null"]
        return _WithoutDefault(kinds[0]) if len(kinds) == 1 else found


class _WithoutDefault(dict[str, Any]):
    """A schema that takes no null for its default: the form would send it, and Prefect would refuse it."""

    def __setitem__(self, key: str, value: Any) -> None:
        if (key, value) != ("default", None):
            super().__setitem__(key, value)


def checked(model: type[_ArgumentsT], given: Mapping[str, Any]) -> _ArgumentsT:
    """Returns the record of a flow's parameters. `model_dir` defaults to the YAML's folder.
    Raises InputError: a path is relative, a parameter is missing, or values contradict each other.
    """
    present = {name: value for name, value in given.items() if value is not None}
    for name, value in present.items():
        for path in value if isinstance(value, list | tuple) else (value,):
            if isinstance(path, Path):
                _check_absolute(name, path)
    if present.get("config_path") is not None:
        present.setdefault("model_dir", present["config_path"].parent)
    try:
        return model(**present)
    except ValidationError as error:
        first = error.errors()[0]
        place = str(first["loc"][0]) if first["loc"] else "the parameters"
        message = first["msg"].removeprefix("Value error, ")
        raise InputError(
            f"{message}.", where=place, remedy="Start another run. The deployment's form describes each parameter."
        ) from None


def work_folder(given: Path | None) -> Path:
    """Returns the folder that a run writes its study or full experiment in.

    It is never the run's working folder, because a process worker removes that afterwards. Raises InputError: no
    folder is given, it does not exist, or the path is relative.
    """
    if given is None:
        remedy = "Set it in the deployment, or for the run with `--param work_dir=/absolute/path`."
        raise InputError("there is no folder to write in.", where="work_dir", remedy=remedy)
    _check_absolute("work_dir", given)
    if not given.is_dir():
        remedy = "Create it on the run's host, or mount it in the run's container."
        raise InputError(f"{given} is not a folder.", where="work_dir", remedy=remedy)
    return given


def _check_absolute(name: str, path: Path) -> None:
    """A run is seldom started on the host, or in the folder, that it runs in."""
    if not path.is_absolute():
        what = f"{path} is a relative path, and a run has no folder to resolve it in."
        raise InputError(what, where=name, remedy="Give the absolute path on the run's host or in its container.")
