"""The flags of the command line: the predecessor's names, meanings and defaults."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from trial_lib.experiment.errors import InputError
from trial_lib.experiment.metrics import SEARCH_METRICS
from trial_lib.search.methods import METHODS

_Decorator = Callable[[Callable[..., None]], Callable[..., None]]

_EXPERIMENT: list[_Decorator] = [
    click.argument("config_path", type=click.Path(path_type=Path)),
    click.argument("model_dir", type=click.Path(path_type=Path)),
]
_MAP: _Decorator = click.option(
    "--map",
    "mappings",
    multiple=True,
    metavar="KEY=TARGET",
    help="For a program that takes its batch from its command: what sets a DeepSpeed key there, as in "
    "train_micro_batch_size_per_gpu=--batch-size. An option, a variable (BATCH), an override (trainer.batch), a value "
    "in a file (conf.yaml:trainer.batch) or a word by its number (argv:2). May be repeated.",
)
_METHOD: _Decorator = click.option(
    "--method",
    type=click.Choice([method.name for method in METHODS.values() if method.confirms_winner]),
    default="adaptive",
    show_default=True,
    help="The search, with its settings' defaults; `zerotune METHOD --help` shows them.",
)
_MAX_TRIALS: _Decorator = click.option(
    "-mt",
    "--max-trials",
    type=int,
    default=50,
    show_default=True,
    help="Trials in all, the profile trial among them; your own configuration is measured besides.",
)
_MAX_SLOTS: _Decorator = click.option(
    "-ms", "--max-slots", type=int, help="Slots that all trials together may use.  [default: all of this host]"
)
_MAX_MICRO_BATCH: _Decorator = click.option(
    "--max-micro-batch", type=int, help="The largest micro-batch size to try, in samples.  [default: what fits]"
)
_MAX_MINUTES: _Decorator = click.option(
    "--max-minutes", type=float, help="Minutes after which the search starts no further trial.  [default: no limit]"
)
_START: _Decorator = click.option(
    "--start-profile-step",
    type=int,
    default=3,
    show_default=True,
    help="The first optimizer step that is measured, from 1.",
)
_END: _Decorator = click.option(
    "--end-profile-step",
    type=int,
    default=5,
    show_default=True,
    help="The last optimizer step that is measured at least; more are while their times vary.",
)
_LAUNCHER: _Decorator = click.option(
    "--launcher",
    type=click.Choice(["warm", "cold"]),
    default="warm",
    show_default=True,
    help="warm forks the ranks from a primed interpreter, cold starts fresh ones.",
)
_RAY: _Decorator = click.option(
    "--ray",
    "ray_address",
    metavar="ADDRESS",
    help="Spread the trials over the hosts of this Ray cluster: HOST:PORT, or auto.  [default: this host alone]",
)
_JSON: _Decorator = click.option(
    "--json", "as_json", is_flag=True, help="Print the result as one JSON document on standard output."
)
_INCLUDE: _Decorator = click.option(
    "-i",
    "--include",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Files or folders that the code imports from outside the model directory: PATH PATH ...",
)


def _zero_stages(default: str) -> _Decorator:
    return click.option(
        "-z",
        "--zero-stages",
        multiple=True,
        type=click.IntRange(0, 3),
        help=f"ZeRO stages to search: -z 1 2 3  [default: {default}]",
    )


_OPTIONS: list[_Decorator] = [
    _INCLUDE,
    _MAX_TRIALS,
    _MAX_MINUTES,
    _MAX_SLOTS,
    _MAX_MICRO_BATCH,
    click.option(
        "-mct",
        "--max-concurrent-trials",
        type=int,
        default=16,
        show_default=True,
        help="Trials that may run at once, on slots of their own.",
    ),
    click.option(
        "-m",
        "--metric",
        type=click.Choice(list(SEARCH_METRICS)),
        default="FLOPS_per_gpu",
        show_default=True,
        help="What is optimised: "
        + ", ".join(f"{metric.name} in {metric.unit}" for metric in SEARCH_METRICS.values())
        + ". Times are of one optimizer step.",
    ),
    click.option(
        "--from-earlier",
        is_flag=True,
        help="Start from what earlier studies of the experiment in this folder found: confirm the known winner, and "
        "search again only if the code, the versions, the hardware or its throughput have changed.",
    ),
    click.option(
        "--run-full-experiment",
        is_flag=True,
        help="Afterwards, train at full length with the winning configuration.",
    ),
    _RAY,
    _START,
    _END,
    click.option("-r", "--random-seed", type=int, default=42, show_default=True, help="Of the search."),
    click.option(
        "--max-search-runner-restarts",
        type=int,
        default=5,
        show_default=True,
        help="How often a search that failed is started again, where it was.",
    ),
    _LAUNCHER,
    _JSON,
]

_BATCH_POLICY: list[_Decorator] = [
    click.option(
        "--train-batch-size",
        type=int,
        help="Samples of an optimizer step that every configuration has to have.  [default: your configuration's]",
    ),
    click.option(
        "--free-batch",
        is_flag=True,
        help="Let the search choose the samples of an optimizer step: the training changes with them.",
    ),
    click.option(
        "--divisible-by",
        type=int,
        default=1,
        show_default=True,
        help="Try micro-batch sizes only that are multiples of this.",
    ),
    click.option(
        "--memory-headroom",
        type=float,
        default=0.05,
        show_default=True,
        help="Share of a slot's memory to leave free.",
    ),
]
TUNE_OPTIONS: list[_Decorator] = [
    _METHOD,
    _MAP,
    _zero_stages("0 1 2 3; asha, binary and random: 1 2 3"),
    *_OPTIONS,
    *_BATCH_POLICY,
]
MICRO_BATCH_OPTIONS: list[_Decorator] = [
    _MAP,
    _MAX_TRIALS,
    _MAX_SLOTS,
    _MAX_MICRO_BATCH,
    _START,
    _END,
    _LAUNCHER,
    _JSON,
]

_SEARCH_RANGE_FACTOR: _Decorator = click.option(
    "--search-range-factor",
    type=float,
    default=1.0,
    show_default=True,
    help="The largest micro-batch to try, as a multiple of the first guess of the largest that fits.",
)

METHOD_OPTIONS: dict[str, list[_Decorator]] = {
    "asha": [
        click.option("--max-rungs", type=int, default=5, show_default=True, help="Rungs a configuration can climb."),
        click.option(
            "--min-binary-search-trials",
            type=int,
            default=3,
            show_default=True,
            help="Trials of a configuration that complete its first rung.",
        ),
        click.option(
            "--asha-early-stopping",
            type=int,
            default=0,
            show_default=True,
            help="Rungs that are skipped: the first one takes more trials.",
        ),
        click.option(
            "--divisor",
            type=int,
            default=2,
            show_default=True,
            help="One in so many is promoted to the next rung, which takes so many times the trials.",
        ),
        _SEARCH_RANGE_FACTOR,
    ],
    "binary": [_SEARCH_RANGE_FACTOR],
    "random": [
        click.option(
            "--trials-per-random-config",
            type=int,
            default=5,
            show_default=True,
            help="Trials that a configuration has at most.",
        ),
        click.option(
            "--early-stopping",
            type=int,
            help="End the search after so many trials in a row without a new best.  [default: never]",
        ),
    ],
}


def method_options(method: str) -> list[_Decorator]:
    """Returns the arguments and flags of the command of one method."""
    stages = _zero_stages(" ".join(map(str, METHODS[method].stages)))
    policy = _BATCH_POLICY if METHODS[method].has_batch_policy else []
    return [*_EXPERIMENT, stages, *_OPTIONS, *policy, *METHOD_OPTIONS.get(method, [])]


def with_options(command: Callable[..., None], options: list[_Decorator]) -> Callable[..., None]:
    """Gives a command its arguments and flags."""
    for option in reversed(options):
        command = option(command)
    return command


RECORD_OPTIONS: list[_Decorator] = [
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
    _START,
    _END,
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
