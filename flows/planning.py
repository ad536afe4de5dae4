"""`zerotune plan` and `zerotune estimate`: tables of what fits, and how fast it trains."""

import contextlib
import fcntl
import importlib
import json
import os
import shlex
import shutil
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from zerotune.flows.interrupts import interrupts
from zerotune.flows.terminal import print_document, say, say_error, say_ways, telling_still
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.inputs.read_experiment import read_experiment
from zerotune.trial_lib.messages.errors import ProgramNotForeseenError, plain
from zerotune.trial_lib.plan.answer import (
    TIME_WORDS,
    fewest_sentence,
    grouped,
    is_bound_by_loading,
    layout_cells,
    likelihood,
    money,
)
from zerotune.trial_lib.plan.plan_record import (
    TRAINING_HOURS,
    PlanArguments,
    PlannedArm,
    PlannedDevices,
    PlannedRange,
    PlannedTraining,
    PlanPaths,
    PlanRecord,
    TrainingRow,
)
from zerotune.trial_lib.records.units import bytes_shown, percent
from zerotune.trial_lib.report.estimate_report import (
    EstimateReport,
    MeasuredArm,
    estimate_report,
)
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.known_trials import ProfileFailedError, earlier_trials, run_profile
from zerotune.trial_lib.study.model_program import with_program
from zerotune.trial_lib.study.open_plan import ReadPlan, open_plan, read_plan
from zerotune.trial_lib.study.open_study import OpenStudy, open_planned, plan_study
from zerotune.trial_lib.study.plan_run import PLANNED_FOR, Simulator, run_plan
from zerotune.trial_lib.tracking.sync import PlanSync, Tracker
from zerotune.trial_lib.tracking.tracking_uri import default_tracking_uri, is_database

# A plan from its arguments to its folder and to MLflow, for the command and for the flow of deployments.

_SCRATCH = "zerotune-plan-"
_TRACKING_CLOSE_S = 30.0


@dataclass(frozen=True)
class PlanEnd:
    record: PlanRecord  # of the plan
    paths: PlanPaths  # its files
    tracker: Tracker  # has sent it to MLflow, or has failed


def plan_to_end(
    arguments: PlanArguments, work_dir: Path, tell: Callable[[str], None], check: Callable[[], None] = interrupts.check
) -> PlanEnd:
    """Runs a plan. Its folder is removed unless its answer and its page are complete.

    Raises:
        InputError: the input is wrong. Nothing was written.
        ProgramNotForeseenError: the program cannot be foreseen.
        KeyboardInterrupt: a signal has arrived.
    """
    with interrupts.opening():
        if arguments.model is not None:
            arguments = with_program(arguments, work_dir)
            tell(f"the program of the model: {arguments.model_dir / 'train.py'}")
        try:
            read = read_plan(arguments, tell, check)
            check()
        except BaseException:
            if arguments.model is not None:
                _remove(arguments.model_dir.parent)
            raise
        tracking_uri = default_tracking_uri(work_dir)
        remove_left_scratch(Path(tempfile.gettempdir()))
        scratch, held = _new_scratch()
        interrupts.leavings.append(scratch)
    for note in read.notes:
        tell(f"note: {note}")
    try:
        return _planned(read, work_dir, scratch, tracking_uri, tell, check)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
        os.close(held)
        with contextlib.suppress(ValueError):
            interrupts.leavings.remove(scratch)


def _remove(root: Path) -> None:
    shutil.rmtree(root, ignore_errors=True)
    with contextlib.suppress(OSError):
        # If no other plan is in it.
        root.parent.rmdir()


def remove_left_scratch(parent: Path) -> None:
    """Removes the scratch folders of plans of this user that were killed. A plan that runs holds its folder."""
    for folder in parent.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            held = _hold(folder) if folder.lstat().st_uid == os.geteuid() else None
            if held is not None:
                shutil.rmtree(folder, ignore_errors=True)
                os.close(held)


def _new_scratch() -> tuple[Path, int]:
    # Makes a scratch folder, and holds it. Another plan may have removed one that was not held yet.
    while True:
        folder = Path(tempfile.mkdtemp(prefix=_SCRATCH))
        with contextlib.suppress(FileNotFoundError):
            held = _hold(folder)
            if held is not None:
                if folder.exists():
                    return folder, held
                os.close(held)


def _hold(folder: Path) -> int | None:
    # Locks a folder until its descriptor is closed, at last by the end of this process; None if another holds it.
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        return None
    return descriptor


def write_page(paths: PlanPaths, tell: Callable[[str], None]) -> None:
    """Writes the page of a plan. If that fails, the plan is complete without it."""
    try:
        # `zerotune show` has no time for jinja.
        from zerotune.trial_lib.report.plan_page import write_plan_page

        write_plan_page(paths)
    except Exception as error:  # noqa: BLE001 - whatever cannot be drawn, the figures are in the record
        tell(f"note: the page was not written ({type(error).__name__}: {error}). {paths.record} has all figures.")


def _import_ahead(tracking_uri: str) -> None:
    # Imports MLflow's client and its store, which takes seconds, while the first run has only one core to use.
    with contextlib.suppress(Exception):
        # An error is the tracker's to tell.
        importlib.import_module("mlflow.tracking")
        if is_database(tracking_uri):
            importlib.import_module("mlflow.store.tracking.sqlalchemy_store")


def _planned(
    read: ReadPlan,
    work_dir: Path,
    scratch: Path,
    tracking_uri: str,
    tell: Callable[[str], None],
    check: Callable[[], None],
) -> PlanEnd:
    opened = open_plan(read, work_dir, scratch)
    root, is_complete = opened.paths.root, False
    interrupts.leavings.append(root)
    processes = read.arguments.max_processes or len(os.sched_getaffinity(0))
    try:
        threading.Thread(target=_import_ahead, args=(tracking_uri,), name="import", daemon=True).start()
        with contextlib.closing(Simulator(opened, tell)) as foresee:
            tell(f"foreseeing {read.experiment.name} on {', '.join(str(each.cluster) for each in read.asked)}")
            record = run_plan(opened, foresee, processes, tell, check)
        check()
        # The page, which a plan can do without.
        tell(f"writing {opened.paths.report}")
        with telling_still("writing the page", tell):
            write_page(opened.paths, tell)
        check()
        # MLflow has a part of it from now on, so an interrupt leaves the plan there.
        interrupts.leavings.remove(root)
        is_complete = True
        after = f"Interrupted after the plan was complete. It is in {root}."
        interrupts.ended = lambda: f"{after} Send it to MLflow with: zerotune sync {shlex.quote(str(root))}"
        tracker = Tracker(lambda: PlanSync(opened.paths, tracking_uri), tracking_uri)
        tell(f"tracking: {tracker.tracking_uri}")
        tracker.start()
        with telling_still("sending the plan to MLflow", tell):
            tracker.close(_TRACKING_CLOSE_S)
        check()
        interrupts.ended = lambda: after
    except BaseException:
        if not is_complete:
            _remove(root)
        raise
    finally:
        with contextlib.suppress(ValueError):
            interrupts.leavings.remove(root)
    return PlanEnd(record, opened.paths, tracker)


# `zerotune plan`: a table of what fits and how fast it trains, for devices that are not here.

_WIDTH = 140  # columns, if the output is no terminal
_NONE_FITS = 1
_MOST_ASKS = 3
_MOST_TABLES = 3  # beside that of the whole training
_OFFLOADS = {"offload-optimizer": "+opt", "offload-param": "+param"}
# The data set alone is on the host too.
_LITTLE = 2**28  # bytes


def plan_command(arguments: PlanArguments, as_json: bool) -> int:
    """Returns 1 if nothing fits, if the program cannot be foreseen, or if the plan contradicts itself.
    Raises InputError: the input is wrong. Nothing was left behind.
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
    """Prints a plan: its tables, its answer, and where its files are."""
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    tokens = "" if record.tokens is None else f" Samples have {record.tokens:,} tokens."
    console.print(
        f"The model has {record.parameters:,} parameters, and {record.trainable:,} of them are trained.{tokens} "
        "All figures are foreseen: no device has measured them. "
        "Intervals are at 90 %. A batch is a micro-batch and its "
        "accumulation; the largest one fits at even odds. +opt and +param: optimizer and parameters are offloaded.",
        highlight=False,
    )
    whole, shown = record.whole, record.devices
    if whole is not None and whole.rows and record.best is not None and len(shown) > _MOST_TABLES:
        shown = (shown[record.best],)
    told: set[str] = set()  # notes that a table before had
    for devices in shown:
        console.print()
        console.print(_fitting(_table(devices), console))
        if devices.layouts:
            console.print(_fitting(_layouts_table(devices), console))
        for line in [*devices.why, fewest_sentence(devices), *(note for note in devices.notes if note not in told)]:
            console.print(plain(line), highlight=False)
        told.update(devices.notes)
    if len(shown) < len(record.devices):
        console.print(f"The page has such a table for each of {len(record.devices)} kinds.", highlight=False)
    if whole is not None and whole.rows:
        console.print()
        table = _training_table(whole)
        wide = console.options.update(width=10 * console.width)
        if console.measure(table, options=wide).minimum > console.width:
            table.columns = [column for column in table.columns if column.header != "fits"]
        console.print(table)
        console.print(TRAINING_HOURS, highlight=False)
    for line in _remarks(record):
        console.print(plain(line), highlight=False)
    tell("")
    tell(record.answer)
    if whole is not None and (whole.answer or whole.missing):
        tell(whole.answer or whole.missing)
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


# What a narrow terminal does without, in this order. The record and the page have all of it.
_DISPENSABLE = ("host", "MFU", "bound by", "largest", "samples/s", "1e9 tokens")


def _fitting(table: Table, console: Console) -> Table:
    for header in _DISPENSABLE:
        if console.measure(table, options=console.options.update(width=10 * console.width)).maximum <= console.width:
            break
        table.columns = [column for column in table.columns if column.header != header or len(table.columns) < 6]
    return table


def _layouts_table(devices: PlannedDevices) -> Table:
    table = Table(
        title=f"Layouts on {devices.label}, by formulas", title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    rows = layout_cells(devices.layouts)
    for column in (*rows[0], "peak", "tokens/s"):
        table.add_column(column, justify="right", no_wrap=True)
    for row, each in zip(rows, devices.layouts, strict=True):
        table.add_row(*row.values(), bytes_shown(each.bytes), _range(each.tokens_per_s))
    return table


def _training_table(whole: PlannedTraining) -> Table:
    title = f"The whole training: {whole.length}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    has_prices = any(row.price for row in whole.shown)
    rows = []
    for row in whole.shown:
        fits = likelihood(row.fits).replace("over ", ">").replace(" ", "")
        figures = (_range(row.hours, 2), _range(row.price if has_prices else row.device_hours, 2))
        name = f"{_brief_label(row)}, {row.micro_batch} x {row.accumulation}"
        rows.append((f"{row.devices}{' *' if row.is_best else ''}", name, fits, *figures, ", ".join(row.marks)))
    for place, header in enumerate(("devices", "arm", "fits", "hours", "price" if has_prices else "device-hours", "")):
        # The arm and the marks may take several lines.
        least = {"arm": 10, "": 9}.get(header) or max(len(row[place]) for row in rows)
        justify: Literal["left", "right"] = "left" if header in ("devices", "arm", "") else "right"
        table.add_column(header, justify=justify, min_width=least, no_wrap=header not in ("arm", ""))
    for row_of_cells in rows:
        table.add_row(*row_of_cells)
    return table


def _brief_label(arm: PlannedArm | TrainingRow) -> str:
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
        longest = TIME_WORDS.get(max(arm.seconds, key=arm.seconds.__getitem__, default=""), ("", ""))[1]
        return f"{longest} ({arm.without_loading:,.3g}/s without)" if is_bound_by_loading(arm) else longest
    return f"memory: {next(iter(grouped(arm.memory)), '')}"


def _range(figure: PlannedRange | None, digits: int = 3) -> str:
    if figure is None:
        return "-"
    value, low, high = (_brief(each, digits) for each in (figure.value, figure.low, figure.high))
    return f"{value} ({low}-{high})"


def _brief(value: float, digits: int) -> str:
    # With `k` or `M`.
    for size, letter in ((1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{float(f'{value / size:.{digits}g}'):g}{letter}"
    return f"{float(f'{value:.{digits}g}'):g}"


def _remarks(record: PlanRecord) -> Iterator[str]:
    unknown = [ask for ask in record.asks if not ask.is_known]
    if unknown:
        named = "; ".join(f"{ask.asker} asked {ask.question} and got {ask.answer}" for ask in unknown[:_MOST_ASKS])
        more = f"; and {len(unknown) - _MOST_ASKS} more" if len(unknown) > _MOST_ASKS else ""
        yield f"The program asked for values that are not known ahead, and got guesses: {named}{more}."
    for note in record.notes:
        yield f"note: {note}"
    parts = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in record.shares.items())
    yield f"Foreseen in {record.seconds:.0f} s ({parts}), with {bytes_shown(record.peak_bytes)} at most in a process."


# A study without servers in a temporary folder, for `estimate` and recorded tables.


@contextlib.contextmanager
def passing_study(arguments: StudyArguments, command: str) -> Iterator[OpenStudy]:
    """Yields an open study. Its folder is removed unless the body fails. Then its logs can be read.
    Raises InputError: the experiment does not fit this host. Nothing was started.
    """
    with interrupts.opening():
        folder = Path(tempfile.mkdtemp(prefix=f"zerotune-{command}-"))
        interrupts.leavings.append(folder)
    study = None
    try:
        with interrupts.opening():
            planned = plan_study(arguments, folder)
            interrupts.check()
            study = open_planned(planned)
        interrupts.again_command = shlex.join(["zerotune", *sys.argv[1:]])
        with interrupts.noting(study.interrupt):
            yield study
            interrupts.check()
    except Exception:
        if study is not None and not interrupts.heard:
            interrupts.leavings.remove(folder)
        raise
    finally:
        if study is not None:
            study.close()
        if folder in interrupts.leavings:
            interrupts.leavings.remove(folder)
            shutil.rmtree(folder, ignore_errors=True)


# `zerotune estimate`: a table of what fits in memory, from earlier studies or one profile trial.

_NARROW = 120  # columns, if the output is no terminal
_SUMS = ("activations", "total", "90 % interval", "largest micro-batch")


def estimate_command(arguments: StudyArguments, as_json: bool) -> int:
    """Returns 1 if the profile trial fails. Raises InputError: the input is wrong. Nothing was started."""
    assert arguments.config_path is not None
    experiment = read_experiment(arguments.config_path, arguments.model_dir, include=arguments.include)
    known = earlier_trials(experiment, Path.cwd())
    if known is None:
        say("This folder has no earlier study of this experiment, so a profile trial runs now.")
        try:
            with passing_study(arguments, "estimate") as study, telling_still("running the profile trial"):
                known = run_profile(study)
        except ProfileFailedError as error:
            say_error(error)
            return 1
    report = estimate_report(known, experiment.config.resources.slots_per_trial, this_host().device, arguments)
    if as_json:
        print_document(report.model_dump(mode="json"))
    else:
        _show(report)
    return 0


def _show(report: EstimateReport) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_NARROW)
    model, source = report.profile, f"studies {', '.join(report.studies)}" if report.studies else "a profile trial"
    lines = [
        f"The model has {model.num_params:,} parameters, and {model.trainable_num_params:,} of them are trained. "
        f"Each of {report.slots} {report.device} slot(s) has {bytes_shown(model.gpu_mem)} for it. "
        f"These numbers come from {source}.",
        f"Activations and totals are for a micro-batch of {report.micro_batch_size}. Totals have 90 % intervals. "
        f"The largest micro-batch has run, or fits with 90 % confidence and leaves {report.headroom:.0%} free. "
        "The one in parentheses fits with 10 % confidence.",
    ]
    if report.bound:
        lines.append(report.bound)
    if report.host_memory is not None:
        lines.append(
            f"Each of {report.slots} ranks may keep {bytes_shown(report.host_memory)} in the host's memory. An arm "
            "that offloads more has no micro-batch."
        )
    offloads = any(row.on_host for row in report.rows)
    table = Table(pad_edge=False)
    for column in ("", "states", *(["on the host"] if offloads else []), *_SUMS):
        table.add_column(column, justify="right" if column else "left", overflow="fold")
    table.add_column("measured")
    for row in report.rows:
        table.add_row(
            row.label,
            bytes_shown(row.states),
            *([bytes_shown(row.on_host) if row.on_host else ""] if offloads else []),
            bytes_shown(row.activations),
            bytes_shown(row.total),
            f"{bytes_shown(row.total_low)} .. {bytes_shown(row.total_high)}",
            report.largest(row),
            "" if row.measured is None else _measured(row.measured),
        )
    for text in [*lines, table, *report.notes]:
        console.print(text, highlight=False)


def _measured(measured: MeasuredArm) -> str:
    said = []
    if measured.largest_micro_batch is not None:
        total = "" if measured.total is None else f", total {bytes_shown(measured.total)}"
        said.append(f"micro-batch {measured.largest_micro_batch} ran{total}")
    if measured.smallest_out_of_memory is not None:
        said.append(f"{measured.smallest_out_of_memory} out of memory")
    if measured.out_of_host_memory:
        said.append(f"{measured.out_of_host_memory} out of host memory")
    return "; ".join(said)
