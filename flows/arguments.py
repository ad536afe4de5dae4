"""The arguments and flags of the commands that tune."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flows.options import Decorator, option
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.metrics import SEARCH_METRICS
from trial_lib.search.methods import METHODS, Method
from trial_lib.search.settings import SearchSettings
from trial_lib.study.arguments import BATCH_POLICY, StudyArguments

_EXPERIMENT: list[Decorator] = [
    click.argument("config_path", type=click.Path(path_type=Path)),
    click.argument("model_dir", type=click.Path(path_type=Path)),
]
_MAP: Decorator = click.option(
    "--map",
    "mappings",
    multiple=True,
    metavar="KEY=TARGET",
    help="For a program that takes its batch from its command: what sets a DeepSpeed key there, as in "
    "train_micro_batch_size_per_gpu=--batch-size. An option, a variable (BATCH), an override (trainer.batch), a value "
    "in a file (conf.yaml:trainer.batch) or a word by its number (argv:2). May be repeated.",
)
_JSON: Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output."
)


def _of_study(field: str, *flags: str, more: str = "") -> Decorator:
    return option(StudyArguments, field, *flags, more=more)


def _zero_stages(default: str) -> Decorator:
    return option(StudyArguments, "zero_stages", "-z", "--zero-stages", default=default)


def _units() -> str:
    return f"Units: {', '.join(f'{metric.name} in {metric.unit}' for metric in SEARCH_METRICS.values())}."


_INCLUDE = _of_study("include", "-i", "--include")
_MAX_TRIALS = _of_study("max_trials", "-mt", "--max-trials")
_MAX_SLOTS = _of_study("max_slots", "-ms", "--max-slots")
_MAX_MICRO_BATCH = _of_study("max_micro_batch")
_WINDOW = [_of_study("start_profile_step"), _of_study("end_profile_step")]
_LAUNCHER = _of_study("launcher")
_OPTIONS: list[Decorator] = [
    _INCLUDE,
    _MAX_TRIALS,
    _of_study("max_minutes"),
    _MAX_SLOTS,
    _MAX_MICRO_BATCH,
    _of_study("max_concurrent_trials", "-mct", "--max-concurrent-trials"),
    _of_study("metric", "-m", "--metric", more=_units()),
    _of_study("from_earlier"),
    _of_study("run_full_experiment"),
    _of_study("ray_address", "--ray"),
    *_WINDOW,
    _of_study("random_seed", "-r", "--random-seed"),
    _of_study("max_search_runner_restarts"),
    _LAUNCHER,
    _JSON,
]
_BATCH_POLICY = [_of_study(field) for field in BATCH_POLICY]


def _stages_of_methods() -> str:
    """Returns which stages each method searches, those of most of them last."""
    methods = [method for method in METHODS.values() if method.confirms_winner]
    named = {stages: [each.name for each in methods if each.stages == stages] for stages in {m.stages for m in methods}}
    return "; ".join(f"{', '.join(names)}: {_numbers(stages)}" for stages, names in sorted(named.items()))


def _numbers(stages: tuple[int, ...]) -> str:
    return " ".join(map(str, stages))


def tune_options() -> list[Decorator]:
    """Returns the flags of `zerotune tune`."""
    method = click.option(
        "--method",
        type=click.Choice([method.name for method in METHODS.values() if method.confirms_winner]),
        default=StudyArguments.model_fields["method"].default,
        show_default=True,
        help="The search, with its settings' defaults; `zerotune METHOD --help` shows them.",
    )
    return [method, _MAP, _zero_stages(_stages_of_methods()), *_OPTIONS, *_BATCH_POLICY]


MICRO_BATCH_OPTIONS: list[Decorator] = [_MAP, _MAX_TRIALS, _MAX_SLOTS, _MAX_MICRO_BATCH, *_WINDOW, _LAUNCHER, _JSON]


def method_options(method: Method) -> list[Decorator]:
    """Returns the arguments and flags of the command of one method."""
    policy = _BATCH_POLICY if method.has_batch_policy else []
    known = {*SearchSettings.model_fields, *StudyArguments.model_fields}
    own = [option(method.settings, field) for field in method.settings.model_fields if field not in known]
    return [*_EXPERIMENT, _zero_stages(_numbers(method.stages)), *_OPTIONS, *policy, *own]


def with_options(command: Callable[..., None], options: list[Decorator]) -> Callable[..., None]:
    """Gives a command its arguments and flags."""
    for each in reversed(options):
        command = each(command)
    return command


RECORD_OPTIONS: list[Decorator] = [
    *_EXPERIMENT,
    click.option(
        "-o", "--output", required=True, type=click.Path(path_type=Path), help="The table's file, JSON lines."
    ),
    click.option(
        "-b",
        "--micro-batch-sizes",
        required=True,
        multiple=True,
        type=click.IntRange(min=1),
        help="Micro-batch sizes to measure, in samples: -b 1 2 4 8",
    ),
    click.option(
        "--repeats", type=click.IntRange(min=1), default=2, show_default=True, help="Measurements of each candidate."
    ),
    _zero_stages("0 1 2 3"),
    _INCLUDE,
    *_WINDOW,
    _LAUNCHER,
]

TYPED_COMMANDS = ("tune", "micro-batch")
"""The commands that are given a command to tune, behind `--`."""


def cut_off_command(words: list[str]) -> tuple[list[str], tuple[str, ...]]:
    """Returns zerotune's own words, and those of the command behind them as they were typed.

    Raises:
        InputError: one of `TYPED_COMMANDS` is followed by no command.
    """
    if not words or words[0] not in TYPED_COMMANDS:
        return words, ()
    own, command = words, ()
    if "--" in words:
        position = words.index("--")
        own, command = words[:position], tuple(words[position + 1 :])
    if not command and "--help" not in own:
        raise InputError(
            "nothing follows `--`." if "--" in words else "there is no `--` with a command behind it.",
            where=f"zerotune {words[0]}",
            remedy=f"Write what you start your training with: `zerotune {words[0]} -- deepspeed train.py ARGUMENTS`.",
        )
    return own, command


_LISTS: dict[str, Callable[[str], bool]] = {
    "-z": str.isdigit,
    "--zero-stages": str.isdigit,
    "-b": str.isdigit,
    "--micro-batch-sizes": str.isdigit,
    "-i": lambda word: not word.startswith("-"),
    "--include": lambda word: not word.startswith("-"),
}


def spread_lists(words: list[str]) -> list[str]:
    """Returns the command line with `-z 1 2` written as `-z 1 -z 2`, which the parser understands.

    The predecessor's lists are separated by spaces.
    """
    spread: list[Any] = []
    remaining = iter(range(len(words)))
    for position in remaining:
        word = words[position]
        belongs = _LISTS.get(word)
        if belongs is None:
            spread.append(word)
            continue
        values = []
        for following in words[position + 1 :]:
            if not belongs(following):
                break
            values.append(following)
        if not values:
            spread.append(word)
        for value in values:
            spread += [word, value]
            next(remaining)
    return spread
