"""`zerotune estimate`: a table of what fits in memory, from earlier studies, foreseen runs or one profile trial.

It starts no Prefect server and writes no MLflow run, because it runs one trial at most.
"""

import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

from flows.commands.passing_study import passing_study
from flows.interrupts import interrupts
from flows.terminal import print_document, say, say_error, telling_still
from trial_lib.device.host.this_host import this_host
from trial_lib.experiment.read_experiment import read_experiment
from trial_lib.records.units import bytes_shown
from trial_lib.report.estimate_report import ArmEstimate, EstimateReport, MeasuredArm, estimate_report
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.earlier.known_trials import KnownTrials, ProfileFailedError, earlier_trials, run_profile
from trial_lib.study.foresight.foreseen_profile import foreseen_profile
from trial_lib.study.foresight.in_background import Foresight
from trial_lib.study.opening.open_study import OpenStudy
from trial_lib.study.opening.size_limit import SizeLimit, size_limit
from trial_lib.wire.errors import InputError

_POLL_S, _WORD_S = 0.1, 4.0
_WIDTH = 120  # columns, if the output is no terminal
_SUMS = ("activations", "total", "90 % interval", "largest micro-batch")


def estimate_command(
    config_path: Path,
    model_dir: Path,
    include: tuple[Path, ...],
    max_micro_batch: int | None,
    memory_headroom: float,
    as_json: bool,
) -> int:
    """Prints the table.

    Args:
        config_path: the experiment's YAML.
        model_dir: the model directory.
        include: files and folders that the code imports from outside the model directory.
        max_micro_batch: the largest micro-batch size to list, in samples. None for what a study would try.
        memory_headroom: the share of a slot's memory to leave free.
        as_json: whether to print one JSON document.

    Returns:
        The exit code, which is 1 if the profile trial fails.

    Raises:
        InputError: the input is wrong. Nothing was started.
    """
    _check(max_micro_batch, memory_headroom)
    experiment = read_experiment(config_path, model_dir, include=include)
    arguments = StudyArguments(config_path=config_path, model_dir=model_dir, include=include)
    known = earlier_trials(experiment, Path.cwd())
    if known is None:
        say("This folder has no earlier study of this experiment, so its program is foreseen now.")
        try:
            with passing_study(arguments, "estimate") as study:
                known = _foreseen(study) or _profiled(study)
        except ProfileFailedError as error:
            say_error(error)
            return 1
    slots = experiment.config.resources.slots_per_trial
    program = None if known.profile is None else known.profile[1].program
    limit = size_limit(arguments, known.base_config, known.model_profile, program)
    if max_micro_batch is not None:
        limit = SizeLimit(size=max_micro_batch, by="--max-micro-batch")
    report = estimate_report(known, slots, this_host().device, memory_headroom, limit)
    if as_json:
        print_document(report.model_dump(mode="json"))
    else:
        _show(report)
    return 0


def _foreseen(study: OpenStudy) -> KnownTrials | None:
    """Returns what foreseen runs show of the program; None, with a line to the user, if it cannot be foreseen."""
    setup, starter = study.driver.setup, study.driver.place.starter_here
    if starter is None:
        return None
    foresight = Foresight(setup, starter, study.paths.root / "foreseen")
    began = said_at = time.monotonic()
    foresight.begin()
    try:
        while foresight.is_running:
            interrupts.check()
            time.sleep(_POLL_S)
            if (now := time.monotonic()) - said_at > _WORD_S:
                said_at = now
                say(f"still foreseeing {foresight.doing} ({now - began:.0f} s since the beginning)")
    finally:
        arms = foresight.end()
    if foresight.typed is None or not arms:
        say(f"A profile trial runs now, because the program cannot be foreseen: {foresight.failure}")
        return None
    profile = foreseen_profile(foresight.typed, arms, setup)
    return KnownTrials(profile, None, foresight.base_config, foreseen=arms)


def _profiled(study: OpenStudy) -> KnownTrials:
    with telling_still("running the profile trial"):
        return run_profile(study)


def _check(max_micro_batch: int | None, memory_headroom: float) -> None:
    if max_micro_batch is not None and max_micro_batch < 1:
        raise InputError(f"{max_micro_batch} is not a batch size.", where="--max-micro-batch", remedy="Give 1 or more.")
    if not 0 <= memory_headroom < 1:
        raise InputError(
            f"{memory_headroom} is not a share of the memory.",
            where="--memory-headroom",
            remedy="Give a number of at least 0 and below 1, such as 0.05.",
        )


def _show(report: EstimateReport) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    source = f"studies {', '.join(report.studies)}" if report.studies else "a profile trial"
    if report.is_foreseen:
        source = "runs without a device"
    lines = [
        f"The model has {report.num_params:,} parameters, and {report.trainable_num_params:,} of them are trained. "
        f"Each of {report.slots} {report.device} slot(s) has {bytes_shown(report.device_memory)} for it. "
        f"These numbers come from {source}.",
        f"Activations and totals are for a micro-batch of {report.micro_batch_size}. Totals have 90 % intervals. "
        f"The largest micro-batch has run, or fits with 90 % confidence and leaves {report.headroom:.0%} free. "
        "The one in parentheses fits with 10 % confidence.",
    ]
    if report.bounded_by:
        lines.append(f"Micro-batches above {report.at_most} are not considered, because of {report.bounded_by}.")
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
            _largest(row, report),
            "" if row.measured is None else _measured(row.measured),
        )
    for text in [*lines, table, *report.notes]:
        console.print(text, highlight=False)


def _largest(row: ArmEstimate, report: EstimateReport) -> str:
    if row.largest_micro_batch == report.at_most:
        return f"{report.at_most} {'(all)' if report.bounded_by else 'and more, as far as memory goes'}"
    perhaps = "" if row.perhaps_micro_batch == row.largest_micro_batch else f" ({row.perhaps_micro_batch})"
    return f"{row.largest_micro_batch or 'none'}{perhaps}"


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
