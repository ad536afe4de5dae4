"""Running a plan: its foreseen runs, its answer, and its files."""

import importlib.metadata
import json
import re
import shlex
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config, with_open_batch
from zerotune.trial_lib.launch.rank_starter import EndableStarter, Program
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.foreseen_run import Ask, ForeseenRun
from zerotune.trial_lib.messages.measurement import Import
from zerotune.trial_lib.plan.answer import best_of, plan_answer
from zerotune.trial_lib.plan.arm_work import WantedRun
from zerotune.trial_lib.plan.devices import AskedDevices
from zerotune.trial_lib.plan.layouts import with_layouts
from zerotune.trial_lib.plan.plan_record import PlannedDevices, PlanRecord, read_length, write_run
from zerotune.trial_lib.plan.planning import Planned, PlanProblem, plan
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.plan.whole_training import largest_that_fit, length_of, whole_training
from zerotune.trial_lib.records.result import read_program
from zerotune.trial_lib.records.switches import deepspeed_part, switches_of
from zerotune.trial_lib.study.open_plan import DEVICE, OpenPlan, ReadPlan
from zerotune.trial_lib.study.profile_report import program_notes
from zerotune.trial_lib.study.program import KnownProgram, leading_imports_of, require_switchable, varied_options
from zerotune.trial_lib.study.training_command import training_command

PLANNED_FOR = "# Planned for"  # begins a command that starts another number of ranks than the plan is for


def run_plan(
    opened: OpenPlan,
    foresee: "Simulator",
    processes: int,
    tell: Callable[[str], None] = lambda text: None,
    check: Callable[[], None] = lambda: None,
) -> PlanRecord:
    """Runs a plan to its end, and writes its record and its answer into its folder.

    `check` is called often, and its error ends the planning. Raises ProgramNotForeseenError, and InputError if the
    batch cannot be divided over the devices.
    """
    read, arguments = opened.read, opened.read.arguments
    problem = PlanProblem(
        asked=read.asked,
        base_config=read.base_config,
        stages=arguments.zero_stages,
        requests=read.experiment.requests,
        device=DEVICE,
        train_batch_size=arguments.train_batch_size,
        free_batch=arguments.free_batch,
        max_micro_batch=arguments.max_micro_batch,
        headroom=arguments.memory_headroom,
        processes=processes,
        allocator=opened.allocator,
        switches=opened.switches,
    )
    found = plan(problem, _OfProgram(opened, foresee), tell, check, foresee.close, foresee.end)
    check()
    record = _record(opened, found)
    if record.best_command:
        write_whole(opened.paths.best_command, record.best_command)
    write_whole(opened.paths.record, record.model_dump_json(indent=1) + "\n")
    return record


class _OfProgram:
    """Foresees the wanted runs of one program, and keeps each in the plan's folder."""

    def __init__(self, opened: OpenPlan, foresee: "Simulator") -> None:
        self._opened = opened
        self._foresee = foresee
        self._base = opened.read.base_config
        self._known = KnownProgram.of(opened.read.experiment)

    def __call__(self, wanted: WantedRun) -> ForeseenRun:
        config = overwrite_deepspeed_config(self._base, wanted.overrides) if wanted.overrides else {}
        program = self._opened.program(wanted.name, wanted.asked.count, config, self._known)
        run = self._foresee(wanted.name, program, wanted.overrides, wanted.asked)
        if wanted.is_first and not run.stopped:
            found = read_program(run.program)
            require_switchable(self._opened.switches, found, self._opened.read.arguments.config_path)
            self._foresee.prime(run.imported)
            # The command's own flags set what the program was seen to read from it.
            mappings = {**found.arg_mappings, **self._known.arg_mappings}
            self._known = replace(self._known, arg_mappings=mappings, found=found)
            self._base = self._base or run.program.get("ds_config") or run.ds_config
        write_run(self._opened.paths.run(wanted.name), replace(run, imported=()))
        return run


def _record(opened: OpenPlan, found: Planned) -> PlanRecord:
    read, typed = opened.read, found.typed
    arguments = read.arguments
    if arguments.model is not None:
        # The length of random data is nobody's.
        typed = replace(typed, program={**typed.program, "samples_per_epoch": None, "whole_epochs": None})
    length = read_length(arguments.whole) if arguments.whole else length_of(typed.program)
    training = whole_training(found.devices, found.runs, typed, length, arguments.within)
    devices = tuple(
        each.model_copy(update={"notes": (*each.notes, *largest_that_fit(each, found.runs))}) for each in found.devices
    )
    if arguments.layouts:
        devices = tuple(map(partial(_with_layouts, read, found), devices, read.asked))
    best = best_of(devices, set() if training is None else training.in_time)
    batches = {policy.train_batch_size for policy in found.policies.values()}
    stopped = sorted({arm.stopped for devices in found.devices for arm in devices.arms if arm.stopped})
    notes = [
        *read.notes,
        *found.notes,
        *program_notes(read_program(typed.program) if typed.program else None),
        *dict.fromkeys(note for run in found.runs.values() for note in run.notes),
        *(f"An arm cannot be foreseen: {reason}" for reason in stopped),
    ]
    record = PlanRecord(
        plan_id=opened.plan_id,
        name=read.experiment.name,
        command=_command(opened),
        model_dir=str(read.experiment.model_dir),
        ds_config=dict(found.base_config),
        # The global batch that all devices keep; None if it differs, or is free.
        train_batch_size=batches.pop() if len(batches) == 1 else None,
        parameters=typed.parameters,
        trainable=typed.trainable,
        tokens=typed.tokens,
        formats=typed.formats,
        program=typed.program,
        devices=devices,
        best=best,
        whole=training,
        answer=plan_answer(devices, best),
        asks=_asks(found),
        notes=tuple(notes),
        versions={"zerotune": importlib.metadata.version("zerotune"), **typed.versions},
        started_at=opened.started_at,
        seconds=time.monotonic() - opened.began_at,
        shares=dict(found.shares),
        peak_bytes=max(run.peak_bytes for run in found.runs.values()),
    )
    return record.model_copy(update={"best_command": _best_command(opened, record)})


def _with_layouts(read: ReadPlan, found: Planned, devices: PlannedDevices, asked: AskedDevices) -> PlannedDevices:
    typed = found.typed
    batch = found.policies[asked.count].train_batch_size or typed.micro_batch * typed.accumulation * asked.count
    return with_layouts(devices, typed, asked.cluster, batch, read.experiment.requests, read.arguments)


def _command(opened: OpenPlan) -> tuple[str, ...]:
    typed = opened.read.arguments.command
    if typed:
        return typed
    entrypoint = opened.read.experiment.config.entrypoint
    return tuple(shlex.split(entrypoint) if isinstance(entrypoint, str) else entrypoint or ())


def _asks(found: Planned) -> tuple[Ask, ...]:
    most: Counter[Ask] = Counter()
    for run in found.runs.values():
        for ask in run.asks:
            key = replace(ask, count=1)
            most[key] = max(most[key], ask.count)
    asks = [replace(ask, count=count) for ask, count in most.items()]
    return tuple(sorted(asks, key=lambda ask: (ask.is_known, -ask.count)))


def _best_command(opened: OpenPlan, record: PlanRecord) -> str:
    # The command to start with the answer, and writes the files that it names; empty without an answer.
    chosen = record.chosen
    if record.best is None or chosen is None:
        return ""
    devices: PlannedDevices = record.devices[record.best]
    asked = opened.read.asked[record.best]
    config = deepspeed_part(chosen.ds_config)
    known = KnownProgram.of(opened.read.experiment, opened.environment)
    if record.program:
        known = known.learned(read_program(record.program)).on_ranks(devices.count)
    setup = opened.setup(asked)
    written = with_open_batch(known.in_file(config), known.own_config(setup.experiment))
    write_whole(opened.paths.best_ds_config, json.dumps(written, indent=2) + "\n")
    command = training_command(setup, known, config, switches_of(chosen.ds_config))
    ranks = f"{devices.per_node} ranks" if devices.nodes == 1 else f"{devices.nodes} hosts of {devices.per_node} ranks"
    entrypoint = setup.experiment.entrypoint
    if entrypoint.launcher and entrypoint.slots != devices.count:
        return f"{PLANNED_FOR} {devices.label}: start {ranks}.\n{command}"
    return command


# Foresees the runs of a plan: one fork server, and a process for each run.

_LOG = re.compile(r"; its log is (\S+)\.$")
_LONGEST = 200


def _with_last_line(stopped: str) -> str:
    # Why a run was stopped with the last line of its log, which is removed with the plan's scratch folder.
    found = _LOG.search(stopped)
    if found is None:
        return stopped
    log = Path(found[1])
    text = log.read_text(errors="replace") if log.is_file() else ""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    said = f". The last line of its output: {lines[-1][:_LONGEST]}" if lines else ""
    return f"{stopped[: found.start()]}{said.rstrip('.')}."


class Simulator:
    """Foresees runs of one program, each in a process of its own, from several threads at once."""

    def __init__(self, opened: OpenPlan, note: Callable[[str], None]) -> None:
        self._opened = opened
        self._note = note
        self._starter: WarmStarter | None = None
        self._starting = threading.Lock()
        self._running: dict[str, EndableStarter] = {}
        self._is_closed = False

    def __call__(self, name: str, program: Program, overrides: Mapping[str, Any], asked: AskedDevices) -> ForeseenRun:
        """`overrides` are merged into the configuration of the engine that trains. No other run has this name."""
        device = asked.cluster.device
        pretended = Pretended(
            world=asked.count,
            ranks_per_host=asked.cluster.per_host,
            device_bytes=int(device.memory),
            device_name=device.cuda_name,
            capability=device.capability,
        )
        folder = self._opened.scratch / name
        starter = self._running[name] = EndableStarter(self._started(program))
        deadline, options = self._opened.read.arguments.deadline, varied_options(self._opened.read.experiment)
        try:
            run = simulate(program, overrides, pretended, folder, starter, deadline, varied_options=options)
        finally:
            del self._running[name]
        return replace(run, stopped=_with_last_line(run.stopped)) if run.stopped else run

    def prime(self, imported: Sequence[Import]) -> None:
        with self._starting:
            starter = None if self._is_closed else self._starter
        if starter is not None:
            starter.prime(imported)

    def end(self, name: str) -> None:
        starter = self._running.get(name)
        if starter is not None:
            starter.end()

    def close(self) -> None:
        with self._starting:
            self._is_closed = True
            starter = self._starter
        if starter is not None:
            starter.close()

    def _started(self, program: Program) -> WarmStarter:
        with self._starting:
            if self._is_closed:
                raise InterruptedError
            if self._starter is None:
                leading = leading_imports_of(self._opened.read.experiment, program.environment)
                self._starter = starter_for(program, self._opened.scratch / "server", self._note, leading)
            return self._starter
