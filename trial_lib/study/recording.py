"""Recording a table: every candidate of a grid is measured, one after another and alone."""

import platform
import random
from collections.abc import Callable, Sequence
from pathlib import Path

from trial_lib.deepspeed_config.layout import Replicas
from trial_lib.deepspeed_config.overrides import ACCUMULATION
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import drop_torn_tail
from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.table import RecordedTable, TableHead, TableRow, append_line, key_of, read_table
from trial_lib.search.knobs import SearchSpace
from trial_lib.study.driver import StudyDriver
from trial_lib.study.runner import Work


def record_table(
    driver: StudyDriver,
    candidates: Sequence[Candidate],
    repeats: int,
    output: Path,
    tell: Callable[[int, int, Candidate, TrialResult], None],
) -> RecordedTable:
    """Measures every candidate and writes one line for each trial. An interrupted recording can be resumed.

    The repeats of a candidate are apart in time, and each pass has an order of its own. So a drift of the machine
    affects all candidates alike. A candidate that does not complete is not repeated. `tell` gets the numbers of
    finished and of all trials. Raises InputError if the file is no table, or belongs to another experiment.
    """
    assert driver.state.profile is not None
    assert driver.state.profile.profile is not None
    head = _head(driver)
    if not output.exists():
        append_line(output, head)
    table = read_table(output)
    for name in ("entrypoint", "base_config", "slots", "device", "memory_limit"):
        if getattr(table.head, name) != getattr(head, name):
            raise InputError(
                f"it belongs to another experiment: its {name} is {getattr(table.head, name)}.",
                where=str(output),
                remedy="Name another file.",
            )
    drop_torn_tail(output)
    total = len(candidates) * repeats
    for repeat in range(repeats):
        order = list(candidates)
        random.Random(repeat).shuffle(order)
        for position, candidate in enumerate(order):
            known = table.rows.setdefault(key_of(candidate), [])
            if len(known) > repeat or (known and known[-1].outcome is not Outcome.COMPLETED):
                continue
            plan = driver.plan_again(Purpose.RECORD, candidate)
            (result,) = driver.run(Work((plan,)))
            driver.next_ended(timeout_s=0.0)
            assert isinstance(result, TrialResult)
            if result.outcome is Outcome.CANCELLED:
                return table
            row = TableRow.of(candidate, repeat, result)
            append_line(output, row)
            known.append(row)
            tell(repeat * len(order) + position + 1, total, candidate, result)
    return table


def grid(driver: StudyDriver, space: SearchSpace, sizes: Sequence[int]) -> list[Candidate]:
    """Every lineage of a space at each micro-batch size (samples), with the user's accumulation."""
    assert driver.state.profile is not None
    profile = driver.state.profile.profile
    assert profile is not None
    replicas = Replicas(driver.setup.slots, profile.data_parallel_size, driver.known.base_config)
    accumulation = driver.known.base_config.get(ACCUMULATION, "auto")
    return [
        Candidate(
            knobs=arm.lineage(index),
            micro_batch_size=size,
            gradient_accumulation_steps=1 if accumulation == "auto" else accumulation,
            slots=driver.setup.slots,
            data_parallel_size=replicas.of(arm.knobs),
        )
        for arm in space.arms
        for index in range(arm.size)
        for size in sizes
    ]


def _head(driver: StudyDriver) -> TableHead:
    profile, experiment = driver.state.profile, driver.setup.experiment
    assert profile is not None
    assert profile.profile is not None
    return TableHead(
        name=experiment.name,
        entrypoint=[*experiment.entrypoint.arguments],
        base_config=driver.known.base_config,
        slots=experiment.config.resources.slots_per_trial,
        device=driver.setup.device,
        memory_limit=driver.setup.memory_limit,
        profile=profile.profile,
        machine={
            "processor": platform.processor() or platform.machine(),
            "slots": str(len(driver.setup.host.slots)),
            **profile.versions,
        },
    )
