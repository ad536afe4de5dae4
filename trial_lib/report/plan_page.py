"""The page of a plan: one self-contained HTML file."""

import json
from collections.abc import Mapping
from typing import Any

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.secrets import redact
from zerotune.trial_lib.plan.answer import fewest_sentence, layout_cells, likelihood, money
from zerotune.trial_lib.plan.plan_record import (
    PlannedArm,
    PlannedDevices,
    PlannedRange,
    PlanPaths,
    PlanRecord,
    kept_runs,
)
from zerotune.trial_lib.plan.scaling import have_same_events, scaled_run
from zerotune.trial_lib.records.switches import PROGRAM, deepspeed_part, switches_of
from zerotune.trial_lib.records.units import bytes_shown
from zerotune.trial_lib.report.chart import Drawn
from zerotune.trial_lib.report.html_report import page_template
from zerotune.trial_lib.report.plan_figures import (
    DEVICE,
    HOST,
    StepLine,
    arms_memory_figure,
    arms_time_figure,
    count_memory_figure,
    devices_key,
    devices_name,
    figure_text,
    host_figure,
    line_figure,
    speed_figure,
    step_line,
    training_figure,
)
from zerotune.trial_lib.report.read_study import setting_changes
from zerotune.trial_lib.report.study_view import shown_view

StepLines = tuple[StepLine | None, StepLine | None]
"""A step in the memory of a device and in that of the host."""


def render_plan(record: PlanRecord, lines: Mapping[str, StepLines]) -> str:
    """`lines` has the step of the chosen arm, by the labels of devices. Those that have none are missing."""
    of_devices = [(each, _figures(each, lines.get(each.label, (None, None)))) for each in _best_first(record)]
    counts = _count_figures(record)
    chosen = record.chosen
    return page_template("plan.html.j2").render(
        record=record,
        devices=of_devices,
        counts=counts,
        training=None if record.whole is None or not record.whole.rows else training_figure(record.whole),
        cards=_cards(record),
        changes=[] if chosen is None else setting_changes(redact(_own_settings(record)), redact(chosen.ds_config)),
        config="" if chosen is None else json.dumps(redact(deepspeed_part(chosen.ds_config)), indent=2),
        unknown=[ask for ask in record.asks if not ask.is_known],
        known=[ask for ask in record.asks if ask.is_known],
        facts=_facts(record),
        name_of=devices_name,
        key_of=devices_key,
        fits=likelihood,
        figure=figure_text,
        money=money,
        fewest=fewest_sentence,
        ends=_ends,
        why=_why,
        has_host=keeps_on_host,
        layout_cells=layout_cells,
        share=lambda value: f"{100 * value:.2g}",
    )


def _own_settings(record: PlanRecord) -> dict[str, Any]:
    # The user's DeepSpeed configuration, with the program's switches in the section `program`.
    own = next((arm for devices in record.devices for arm in devices.arms if arm.is_own), None)
    switches = {} if own is None else switches_of(own.ds_config)
    return {**record.ds_config, **({PROGRAM: switches} if switches else {})}


def _best_first(record: PlanRecord) -> list[PlannedDevices]:
    return sorted(record.devices, key=lambda each: record.best is None or each is not record.devices[record.best])


def _figures(devices: PlannedDevices, lines: StepLines) -> list[Drawn]:
    on_device, on_host = lines
    if not any(arm.peak for arm in devices.arms):
        return []
    figures = [] if on_device is None else [line_figure(devices, on_device)]
    if on_host is not None and keeps_on_host(devices):
        figures.append(host_figure(devices, on_host))
    return [*figures, arms_memory_figure(devices), arms_time_figure(devices)]


def keeps_on_host(devices: PlannedDevices) -> bool:
    """Whether any arm keeps enough in the host's memory to be shown. Each keeps a few counters there."""
    return any(arm.host > 0.01 * devices.usable for arm in devices.arms)


def _count_figures(record: PlanRecord) -> list[Drawn]:
    kinds = list({each.device: each for each in _best_first(record)[::-1] if each.counts}.values())[::-1]
    if not kinds:
        return []
    same = (
        "The global batch may grow with their number."
        if record.train_batch_size is None
        else f"The global batch of {record.train_batch_size:,} samples stays the same."
    )
    return [speed_figure(kinds, same), count_memory_figure(kinds)]


def _cards(record: PlanRecord) -> list[tuple[str, str, str]]:
    arm = record.chosen
    if record.best is None or arm is None:
        return []
    devices = record.devices[record.best]
    cards = []
    if arm.samples_per_s is not None:
        cards.append(("Samples/s", figure_text(arm.samples_per_s.value), f"90 % interval {_ends(arm.samples_per_s)}"))
    if arm.tokens_per_s is not None:
        cards.append(("Tokens/s", figure_text(arm.tokens_per_s.value), f"90 % interval {_ends(arm.tokens_per_s)}"))
    if arm.peak is not None:
        cards.append(("Memory of a device", bytes_shown(arm.peak.value), f"of {bytes_shown(devices.usable)}"))
    cards.append(("It fits", likelihood(arm.fits), f"micro-batch {arm.micro_batch}"))
    if arm.cost is not None:
        cards.append(("A billion tokens", money(arm.cost.value), f"{_ends(arm.cost)}, at the given price"))
    own = (
        []
        if record.whole is None
        else [row for row in record.whole.shown if (row.devices, row.label) == (devices.label, arm.label)]
    )
    if own:
        cards.append(("The whole training", f"{figure_text(own[0].hours.value)} h", _ends(own[0].hours)))
        if own[0].price is not None:
            cards.append(("Its price", money(own[0].price.value), _ends(own[0].price)))
    if devices.fewest is not None:
        cards.append(("Fewest devices", f"{devices.fewest:,}", "on which it trains"))
    return cards


def _why(arm: PlannedArm) -> list[str]:
    if arm.stopped:
        return [arm.stopped]
    bounds = {"memory": arm.memory_bound, "time": arm.time_bound}
    # What is in brackets explains the word, and stands in the sentences above the table.
    return [f"{name}: {bound.partition(' (')[0]}" for name, bound in bounds.items() if bound]


def _ends(figure: PlannedRange) -> str:
    return f"{figure_text(figure.low)} to {figure_text(figure.high)}"


def _facts(record: PlanRecord) -> dict[str, str]:
    facts = {
        "command": " ".join(record.command),
        "folder": record.model_dir,
        "parameters": f"{record.parameters:,}" if record.parameters else "",
        "trained of them": f"{record.trainable:,}" if record.trainable not in (0, record.parameters) else "",
        "tokens of a sample": "" if record.tokens is None else f"{record.tokens:,}",
        "global batch": "" if record.train_batch_size is None else f"{record.train_batch_size:,} samples",
        "number formats": ", ".join(record.formats),
        "versions": ", ".join(f"{name} {version}" for name, version in record.versions.items()),
        "time of the plan": ", ".join(f"{name} {seconds:.1f} s" for name, seconds in record.shares.items()),
        "memory of the plan": bytes_shown(record.peak_bytes) if record.peak_bytes else "",
    }
    return {name: value for name, value in facts.items() if value}


def write_plan_page(paths: PlanPaths) -> None:
    """Raises OSError if a file is missing, or the disk is full."""
    secrets = KnownSecrets.of(paths.experiment, paths.record)
    record = PlanRecord.model_validate_json(paths.record.read_text())
    runs = {each.label: run for each in record.devices if (run := step_run(paths, each)) is not None}
    lines = {label: (step_line(run, DEVICE), step_line(run, HOST)) for label, run in runs.items()}
    write_whole(paths.report, render_plan(shown_view(record, secrets), lines))


def step_run(paths: PlanPaths, devices: PlannedDevices) -> ForeseenRun | None:
    """The run of the chosen arm at its micro-batch, as near as its runs come; None without runs of it."""
    arm = devices.chosen
    runs = {} if arm is None else kept_runs(devices, paths, arm.label)
    if arm is None or arm.label not in runs:
        return None
    known = runs[arm.label]
    small, large = known.at_replicas(devices.count * known.small.replicas // known.small.world)
    if large is None:
        return small
    if have_same_events(small, large):
        return scaled_run(small, larger=large, micro_batch=arm.micro_batch)
    return min((small, large), key=lambda run: abs(run.micro_batch - arm.micro_batch))
