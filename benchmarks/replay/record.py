"""Records a table: measures every candidate of an experiment's search space, so that searches can be replayed on it.

    python -m benchmarks.replay.record CONFIG_PATH MODEL_DIR -o table.jsonl -b 1 2 4 8 16

It can be interrupted at any time. The same command then goes on.
"""

import argparse
import platform
import random
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from pathlib import Path

from benchmarks.replay.recorded import RecordedTable, TableHead, TableRow, append_line, key_of, read_table
from zerotune.flows.interrupts import interrupts
from zerotune.flows.planning import passing_study
from zerotune.flows.terminal import say, say_error
from zerotune.trial_lib.deepspeed_config.layout import Replicas
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import drop_torn_tail
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.report.study_view import flat_knobs
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.known_trials import ProfileFailedError, run_profile
from zerotune.trial_lib.study.limits import study_space
from zerotune.trial_lib.study.runner import Work

MOST_CANDIDATES = 20_000


def record(arguments: StudyArguments, sizes: Sequence[int], repeats: int, output: Path) -> int:
    """Records a table of every family of the experiment's search space at each micro-batch size.

    Measurements that the table already contains are not repeated. Returns 1 if the profile trial fails. Raises
    InputError: the input is wrong. Nothing was measured.
    """
    if not output.absolute().parent.is_dir():
        raise InputError("its folder does not exist.", where=str(output), remedy="Name a file in a folder that exists.")
    try:
        with passing_study(arguments, "record") as study:
            # What the table has already is not measured again.
            interrupts.resume_command = shlex.join(["python", "-m", "benchmarks.replay.record", *sys.argv[1:]])
            run_profile(study)
            driver = study.driver
            driver.next_ended(timeout_s=0.0)
            candidates = grid(driver, sizes)
            say(f"Measuring {len(candidates)} candidates, {repeats} times each, into {output}.")
            record_table(driver, candidates, repeats, output, tell=_Teller())
    except ProfileFailedError as error:
        say_error(error)
        return 1
    return 0


class _Teller:
    def __init__(self) -> None:
        self._started = time.monotonic()
        self._measured = 0

    def __call__(self, done: int, total: int, candidate: Candidate, result: TrialResult) -> None:
        interrupts.check()
        self._measured += 1
        per_trial = (time.monotonic() - self._started) / self._measured
        left = timedelta(seconds=round(per_trial * (total - done)))
        throughput = result.metrics.get("throughput")
        said = result.outcome.value if throughput is None else SEARCH_METRICS["throughput"].shown(throughput)
        say(f"{done}/{total}, {left} left: {candidate.label} {flat_knobs(candidate.knobs)}: {said}")


def record_table(
    driver: StudyDriver,
    candidates: Sequence[Candidate],
    repeats: int,
    output: Path,
    tell: Callable[[int, int, Candidate, TrialResult], None],
) -> RecordedTable:
    """Measures every candidate alone and writes one line for each trial. An interrupted recording can be resumed.

    The repeats of a candidate are apart in time, and each pass has an order of its own. So a drift of the machine
    affects all candidates alike. A candidate that does not complete is not repeated. `tell` gets the numbers of
    finished and of all trials. Raises InputError if the file is no table, or belongs to another experiment.
    """
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


def grid(driver: StudyDriver, sizes: Sequence[int]) -> list[Candidate]:
    """Every family of the search space at each micro-batch size (samples), with the user's accumulation."""
    profile = driver.state.profile
    assert profile is not None
    assert profile.profile is not None
    space = study_space(driver.setup, driver.known.base_config, profile)
    count = sum(arm.size for arm in space.arms) * len(sizes)
    if count > MOST_CANDIDATES:
        what = f"the search space has {count:,} candidates, and a table has at most {MOST_CANDIDATES:,}."
        raise InputError(what, where="search_space", remedy="Fix some knobs there, or give them fewer values.")
    replicas = Replicas(driver.setup.slots, profile.profile.data_parallel_size, driver.known.base_config)
    accumulation = driver.known.base_config.get(ACCUMULATION, "auto")
    return [
        Candidate(
            knobs=arm.family(index),
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


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("config_path", type=Path, help="the experiment's YAML, whose `search_space` is measured")
    parser.add_argument("model_dir", type=Path, help="the folder with its code")
    parser.add_argument("-o", "--output", type=Path, required=True, help="write the table to this file")
    parser.add_argument("-b", "--micro-batch-sizes", type=int, nargs="+", required=True, help="in samples")
    parser.add_argument("--repeats", type=int, default=2, help="measure each candidate this often")
    parser.add_argument("-z", "--zero-stages", type=int, nargs="+", default=[0, 1, 2, 3])
    for name in ("include", "start_profile_step", "end_profile_step", "start"):
        parser.add_argument(f"--{name.replace('_', '-')}", nargs="+" if name == "include" else None)
    return parser.parse_args()


def main() -> int:
    options = {name: value for name, value in vars(_arguments()).items() if value is not None}
    output, sizes, repeats = (options.pop(name) for name in ("output", "micro_batch_sizes", "repeats"))
    try:
        arguments = StudyArguments.model_validate({"method": "adaptive", **options})
        return interrupts.run(lambda: record(arguments, sorted(set(sizes)), repeats, output))
    except InputError as error:
        say_error(error)
        return 2


if __name__ == "__main__":
    interrupts.end(main())
