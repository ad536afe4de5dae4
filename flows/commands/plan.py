"""`zerotune plan`: a table of what fits and how fast it trains, for devices that are not here.

It starts no Prefect server, because it is over in a minute.
"""

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from flows.interrupts import interrupts
from flows.plan_to_end import PlanEnd, plan_to_end
from flows.terminal import print_document, say, say_error, say_ways
from trial_lib.foresee.plan.answer import TIME_BRIEFLY, fewest_sentence, grouped, is_bound_by_loading, likelihood, money
from trial_lib.foresee.plan.plan_arguments import PlanArguments
from trial_lib.foresee.plan.plan_record import ForeseenRange, PlannedArm, PlannedDevices, PlanPaths, PlanRecord
from trial_lib.foresee.plan.planning import ProgramNotForeseenError
from trial_lib.records.units import bytes_shown, percent
from trial_lib.study.planning.plan_run import PLANNED_FOR
from trial_lib.wire.plain_text import plain

_WIDTH = 140  # columns, if the output is no terminal
_NONE_FITS = 1
_MOST_ASKS = 3
_ALL_FORESEEN = "All figures are foreseen: no device has measured them."
_OFFLOADS = {"offload-optimizer": "+opt", "offload-param": "+param"}
# The data set alone is on the host too.
_LITTLE = 2**28  # bytes


def plan_command(arguments: PlanArguments, as_json: bool) -> int:
    """Plans, and prints the answer.

    Args:
        arguments: the plan's.
        as_json: whether to print one JSON document.

    Returns:
        The exit code, which is 1 if nothing fits, if the program cannot be foreseen, or if the plan contradicts itself.

    Raises:
        InputError: the input is wrong. Nothing was left behind.
    """
    interrupts.again_command = shlex.join(["zerotune", *sys.argv[1:]])
    try:
        end = plan_to_end(arguments, Path.cwd(), say)
    except ProgramNotForeseenError as error:
        say_error(error)
        return _NONE_FITS
    if as_json:
        print_document({**plan_document(end.record, end.paths), "tracking_uri": end.tracker.tracking_uri})
    else:
        show_plan(end.record, end.paths)
        _say_where_it_was_sent(end)
    return _NONE_FITS if end.record.best is None else 0


def plan_document(record: PlanRecord, paths: PlanPaths) -> dict[str, Any]:
    """Returns a plan as one JSON document."""
    best = paths.best_ds_config if paths.best_ds_config.exists() else None
    return {
        **record.model_dump(mode="json"),
        "foreseen": True,
        "folder": str(paths.root),
        "best_ds_config": None if best is None else json.loads(best.read_text()),
        "best_ds_config_path": None if best is None else str(best),
        "report": str(paths.report) if paths.report.exists() else None,
    }


def show_plan(record: PlanRecord, paths: PlanPaths, tell: Callable[[str], None] = say) -> None:
    """Prints a plan: its tables, its answer, and where its files are.

    Args:
        record: of the plan.
        paths: its files.
        tell: prints the answer and the files.
    """
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    tokens = "" if record.tokens is None else f" Samples have {record.tokens:,} tokens."
    measured = any(devices.measured_on for devices in record.devices)
    by = "Memory is foreseen. So are speeds, unless a note says who measured them." if measured else _ALL_FORESEEN
    console.print(
        f"The model has {record.parameters:,} parameters, and {record.trainable:,} of them are trained.{tokens} {by} "
        "Intervals are at 90 %. A batch is a micro-batch and its "
        "accumulation; the largest one fits at even odds. +opt and +param: optimizer and parameters are offloaded.",
        highlight=False,
    )
    for devices in record.devices:
        console.print()
        console.print(_table(devices))
        for line in [*devices.why, fewest_sentence(devices), *devices.notes]:
            console.print(plain(line), highlight=False)
    for line in _remarks(record):
        console.print(plain(line), highlight=False)
    tell("")
    tell(record.answer)
    if record.best_command:
        tell(f"Configuration: {paths.best_ds_config}")
        first = record.best_command.splitlines()[0]
        if first.startswith(PLANNED_FOR):
            tell(f"Command:       {paths.best_command}. {first.removeprefix('# ')}")
        else:
            tell(f"Start with it: sh {shlex.quote(str(paths.best_command))}")
    tell(f"Plan:          {paths.record}")
    if paths.report.exists():
        tell(f"Report:        {paths.report}")


def _say_where_it_was_sent(end: PlanEnd) -> None:
    if end.tracker.last_error is None:
        say_ways("In MLflow:", end.tracker.ways)
    else:
        say(f"MLflow has not recorded it: {end.tracker.last_error}")
        say(f"Try again with: zerotune sync {shlex.quote(str(end.paths.root))}")


def _table(devices: PlannedDevices) -> Table:
    with_tokens = any(arm.tokens_per_s for arm in devices.arms)
    with_cost = any(arm.cost for arm in devices.arms)
    with_host = any(arm.host > _LITTLE for arm in devices.arms)
    table = Table(title=f"{devices.label}, foreseen", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    columns = ["fits", "batch", "largest", "peak", *(["host"] if with_host else []), "samples/s"]
    columns += ["tokens/s"] if with_tokens else []
    columns += ["MFU", *(["1e9 tokens"] if with_cost else [])]
    table.add_column("", no_wrap=True)
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("bound by")
    for arm in devices.arms:
        own = " (yours)" if arm.is_typed else " (yours, other batch)" if arm.is_own else ""
        marks = (" *" if arm.label == devices.best else "") + own
        name = f"{_brief_label(arm)}{marks}"
        if arm.stopped:
            table.add_row(name, *["-"] * len(columns), "cannot be foreseen")
            continue
        table.add_row(name, *_cells(arm, devices, with_host, with_tokens, with_cost), _bound(arm))
    return table


def _brief_label(arm: PlannedArm) -> str:
    """Returns the name of an arm for a narrow table."""
    label = arm.label.removesuffix("".join(f"-{word}" for word in arm.switches))
    for section, word in _OFFLOADS.items():
        label = label.replace(f"-{section}", f" {word}")
    return " ".join([label, *arm.switches])


def _cells(
    arm: PlannedArm, devices: PlannedDevices, with_host: bool, with_tokens: bool, with_cost: bool
) -> Iterator[str]:
    yield likelihood(arm.fits)
    yield f"{arm.micro_batch} x {arm.accumulation}"
    is_all = arm.largest_micro_batch == arm.most_micro_batch > 0
    yield "none" if not arm.largest_micro_batch else f"{arm.largest_micro_batch}{' (all)' if is_all else ''}"
    yield "-" if arm.peak is None else bytes_shown(arm.peak.value)
    if with_host:
        yield bytes_shown(arm.host) if arm.host > _LITTLE else ""
    yield _range(arm.samples_per_s)
    if with_tokens:
        yield _range(arm.tokens_per_s)
    yield "-" if arm.mfu is None else percent(round(arm.mfu.value, 2))
    if with_cost:
        yield "-" if arm.cost is None else money(arm.cost.value)


def _bound(arm: PlannedArm) -> str:
    if arm.is_likely:
        longest = TIME_BRIEFLY.get(max(arm.seconds, key=arm.seconds.__getitem__, default=""), "")
        return f"{longest} ({arm.without_loading:,.3g}/s without)" if is_bound_by_loading(arm) else longest
    return f"memory: {next(iter(grouped(arm.memory)), '')}"


def _range(figure: ForeseenRange | None) -> str:
    if figure is None:
        return "-"
    value, low, high = map(_brief, (figure.value, figure.low, figure.high))
    return f"{value} ({low}-{high})"


def _brief(value: float) -> str:
    """Returns a number in three digits, with `k` or `M`."""
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{float(f'{value / size:.3g}'):g}{letter}"
    return f"{value:.3g}"


def _remarks(record: PlanRecord) -> Iterator[str]:
    """Yields what the reader has to know about how it was foreseen."""
    unknown = [ask for ask in record.asks if not ask.is_known]
    if unknown:
        named = "; ".join(f"{ask.asker} asked {ask.question} and got {ask.answer}" for ask in unknown[:_MOST_ASKS])
        more = f"; and {len(unknown) - _MOST_ASKS} more" if len(unknown) > _MOST_ASKS else ""
        yield f"The program asked for values that are not known ahead, and got guesses: {named}{more}."
    for note in record.notes:
        yield f"note: {note}"
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in record.shares.items())
    yield f"Foreseen in {record.seconds:.0f} s ({parts}), with {bytes_shown(record.peak_bytes)} at most in a process."
