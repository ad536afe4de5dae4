"""A study as plain data. The report, the terminal and `--json` all show this."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from zerotune.trial_lib.inputs.known_secrets import KnownSecrets
from zerotune.trial_lib.messages.errors import plain
from zerotune.trial_lib.plan.plan_record import PlannedTrials
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord, Purpose
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult, cause_of
from zerotune.trial_lib.records.step_account import StepAccount
from zerotune.trial_lib.records.switches import PROGRAM, is_switch, place_of, shown_switch
from zerotune.trial_lib.records.units import bytes_shown, quantity
from zerotune.trial_lib.search.allocations import ForeseenArm
from zerotune.trial_lib.search.arms import CandidateNames
from zerotune.trial_lib.search.budgets import MemoryBasis
from zerotune.trial_lib.search.memory_model import MODELLED, MemoryModel, measured_above_initialize
from zerotune.trial_lib.study.finding import Worth


class LeaderboardRow(FrozenRecord):
    trial: int  # its number
    purpose: Purpose  # why it ran
    label: str  # its name for people, such as `z2-mbs16`
    micro_batch_size: int  # samples a rank took in one forward pass
    # `fresh` in new processes, `swept` in processes that had measured other micro-batch sizes before
    measured: Literal["fresh", "swept"]
    outcome: Outcome  # how it ended
    reason: str  # one sentence. Empty if it completed.
    metric: str  # the name of the optimised metric
    value: float | None  # its value. None if the trial did not complete.
    throughput: float | None  # samples/s over all ranks
    peak_memory: int | None  # bytes, of the rank that needed most
    knobs: dict[str, Any]  # its settings other than the batch

    @property
    def place(self) -> tuple[bool, bool, float, int]:
        """Sorts rows: completed trials with the best first, then the others in order, the profile trial last."""
        sign = 1.0 if SEARCH_METRICS[self.metric].smaller_is_better else -1.0
        return self.purpose is Purpose.PROFILE, self.value is None, sign * (self.value or 0.0), self.trial


# The tables of trials: the report's, that of `zerotune show`, that of a running study, and Prefect's.

TrialTable = Literal["report", "show", "live", "prefect"]


@dataclass(frozen=True)
class TrialColumn:
    name: str  # its heading
    cell: Callable[[LeaderboardRow], str]  # its text, empty if the trial has nothing to show there
    kind: Literal["trial", "name", "number", "word", "outcome"] = "word"  # numbers stand on the right
    tables: tuple[TrialTable, ...] = ("report", "show", "live", "prefect")


_METRIC = "metric"
TRIAL_COLUMNS = (
    TrialColumn("trial", lambda row: f"{row.trial:04d}", "trial"),
    TrialColumn("candidate", lambda row: row.label, "name"),
    # Its heading is the name of the study's metric.
    TrialColumn(_METRIC, lambda row: SEARCH_METRICS[row.metric].shown(row.value), "number"),
    TrialColumn(
        "samples/s", lambda row: "" if row.throughput is None else quantity(row.throughput, "").rstrip(), "number"
    ),
    TrialColumn("peak memory", lambda row: "" if row.peak_memory is None else bytes_shown(row.peak_memory), "number"),
    TrialColumn(
        "measured",
        lambda row: row.measured if row.outcome is Outcome.COMPLETED else "",
        tables=("report", "show", "prefect"),
    ),
    # The live view has room for a name or for this. It shows the outcome of what failed in the metric's place.
    TrialColumn("outcome", lambda row: row.outcome.value, "outcome", tables=("report", "show", "prefect")),
    TrialColumn("knobs", lambda row: flat_knobs(row.knobs), tables=("prefect",)),
    TrialColumn("reason", lambda row: row.reason, tables=("prefect",)),
)


def trial_columns(table: TrialTable, metric: str, rows: Sequence[LeaderboardRow] = ()) -> list[TrialColumn]:
    """The columns of one table. If the metric itself is in samples/s, no second column has them, and so on.

    `rows` are those of a table with little room. A word that is the same in all of them has no column there.
    """
    of_metric = SEARCH_METRICS[metric].unit
    shown = [column for column in TRIAL_COLUMNS if table in column.tables and column.name != of_metric]
    if len(rows) > 1:
        words = ("word", "outcome")
        shown = [each for each in shown if each.kind not in words or len({each.cell(row) for row in rows}) > 1]
    return [replace(column, name=metric) if column.name == _METRIC else column for column in shown]


def flat_knobs(knobs: Mapping[str, Any]) -> str:
    words = []
    for key, value in knobs.items():
        if key == PROGRAM:
            words += [shown_switch(place, its) for place, its in value.items()]
        else:
            words.append(flat_knobs(value) if isinstance(value, Mapping) else f"{key}={value}")
    return " ".join(words)


def leaderboard(
    results: Mapping[int, TrialResult], candidates: Mapping[int, Candidate], metric: str
) -> list[LeaderboardRow]:
    """The trials that have ended, as `ranked` has them."""
    naming = CandidateNames()
    own = {number for number, result in results.items() if result.purpose is Purpose.SUBMITTED}
    names = {number: naming.of(candidates[number], number in own) for number in sorted(candidates)}
    rows = (row_of(result, candidates[number], names[number], metric) for number, result in results.items())
    return ranked(rows)


def ranked(rows: Iterable[LeaderboardRow]) -> list[LeaderboardRow]:
    """Without the profile's. Completed ones come first, the best at the top."""
    return sorted((row for row in rows if row.purpose is not Purpose.PROFILE), key=lambda row: row.place)


def row_of(result: TrialResult, candidate: Candidate, name: str, metric: str) -> LeaderboardRow:
    """`name` is the candidate's in the study, by `CandidateNames`."""
    return LeaderboardRow(
        trial=result.number,
        purpose=result.purpose,
        label=result.purpose.label(name),
        micro_batch_size=candidate.micro_batch_size,
        measured="swept" if result.swept else "fresh",
        outcome=result.outcome,
        reason=result.reason,
        metric=metric,
        value=result.metrics.get(metric),
        throughput=result.metrics.get("throughput"),
        peak_memory=max(result.memory.peak, default=None),
        knobs=candidate.knobs,
    )


INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval. Both are the value itself if the interval is unknown."""

    value: float
    low: float
    high: float

    @property
    def has_ends(self) -> bool:
        return self.low < self.high


@dataclass(frozen=True)
class MemoryView:
    """The memory that a trial's steps took above initialisation, in bytes on the rank that took most."""

    predicted: Interval  # the memory model's prediction just before the trial's result, with its 90 % interval
    measured: int | None  # the measured value. None if the trial did not complete.
    budget: int | None  # what initialisation left for the steps. None if nothing limits a slot.


@dataclass(frozen=True)
class TrialView:
    row: LeaderboardRow  # as in the leaderboard
    arm: str  # its ZeRO stage and offload, such as `z3-offload-optimizer`
    settings: Mapping[str, Any]  # the varied settings of the trial's complete configuration, by dotted path
    started: float  # seconds since the study began
    ended: float  # seconds since the study began
    # samples/s, with the range of the middle half of its own steps. None if it measured none.
    throughput: Interval | None
    memory: MemoryView | None  # None for the profile trial, and without a prediction
    note: str  # the limits of its measurement. Mostly empty.
    log: str  # the end of its program's output, without secrets
    log_path: str  # the file of the whole log, within the study's folder. Empty if there is none.

    @property
    def number(self) -> int:
        return self.row.trial

    @property
    def completed(self) -> bool:
        return self.row.outcome is Outcome.COMPLETED

    @property
    def is_profile(self) -> bool:
        return self.row.purpose is Purpose.PROFILE


@dataclass(frozen=True)
class ConfirmedView:
    name: str  # for people
    verdict: str  # as in `Finding`; `own` for the user's configuration
    trials: tuple[int, ...]  # the numbers of its confirming trials
    micro_batch_size: int  # samples
    throughput: Interval | None  # samples/s over all fresh processes; the interval is the study's metric's
    gain: Interval | None  # over the user's configuration. None if there is nothing to compare.
    is_winner: bool  # whether it is the answer
    note: str  # why it failed, or the result of comparing its losses


@dataclass(frozen=True)
class SettingChange:
    """A setting that differs between the winner and the user's configuration. None means that one lacks it."""

    setting: str
    own: Any
    winner: Any

    @property
    def name(self) -> str:
        """The setting as people read it: a switch of the program by its place."""
        return place_of(self.setting)

    @property
    def is_of_program(self) -> bool:
        return is_switch(self.setting)


@dataclass(frozen=True)
class StudyView:
    study_id: str  # as in its record
    name: str  # of the experiment
    folder: str  # absolute
    status: str  # of its record. `interrupted` if that says running, but no process drives the study.
    reason: str  # why it failed or was cut short. Empty otherwise.
    regression: str  # how far the winner is behind that of the last study. Empty if it is not.
    method: str  # the search method
    metric: str  # the optimised metric
    headline: str  # the answer in a sentence, or the state of the study
    notes: tuple[str, ...]  # how the answer was found, and further remarks
    gain: float | None  # how many times better than the user's configuration the winner is
    gain_interval: tuple[float, float] | None  # its ends. None if it was not confirmed.
    best_number: int | None  # the winning trial
    before: Mapping[str, float]  # the metrics of the user's configuration, by name. Empty if it was not measured.
    after: Mapping[str, float]  # the metrics of the winner, by name. Empty without one.
    best_config: Mapping[str, Any] | None  # the winner's DeepSpeed configuration, without secrets
    best_command: str  # the command to train with it
    diff: str  # what it changes in the user's own files, as a unified diff. Empty if that is nothing.
    changes: tuple[SettingChange, ...]  # its changes to the user's configuration
    trials: tuple[TrialView, ...]  # the ended trials, in the order of their numbers
    running: Mapping[int, str]  # the running trials, with their names
    withdrawn: int  # sizes of sweeps that were not measured after all
    stopped: str  # why the search ended. Empty before its end.
    max_trials: int  # the budget of the search
    searched: int  # trials of that budget that are spent
    failed: int  # trials that did not complete
    seconds: float  # from the start to the end, or until now
    started_at: float  # seconds since the epoch
    confirmed: tuple[ConfirmedView, ...]  # the configurations that were measured again, the user's first
    facts: Mapping[str, str]  # its circumstances by name: versions, hosts, the model, the arguments
    # What the plan foresaw that the study began with. None without one, or before a trial has ended.
    planned: PlannedTrials | None = None
    num_params: int = 0  # of the model. 0 if they were not counted.
    keeps_batch: bool = True  # whether all its trials had the same global batch
    worths: tuple[Worth, ...] = ()  # what the winner's changes are worth. Empty if they were not weighed.
    why: tuple[StepAccount, ...] = ()  # where the time of a step goes, the winner's first. Empty before the answer.
    # What those of the running trials wait for that have no slots yet
    waiting: Mapping[int, str] = field(default_factory=dict)

    @property
    def ranked(self) -> list[TrialView]:
        return sorted(self.trials, key=lambda trial: trial.row.place)

    def document(self) -> dict[str, Any]:
        """As JSON. It shares the names of `zerotune METHOD --json`."""
        best = next((trial for trial in self.trials if trial.number == self.best_number), None)

        def own(*names: str) -> dict[str, Any]:
            return {name: getattr(self, name) for name in names}

        return {
            "study": self.study_id,
            **own("name", "folder", "status", "reason", "regression", "method", "metric", "headline"),
            "notes": list(self.notes),
            **own("gain", "gain_interval"),
            "best": None if best is None else _trial_document(best),
            "before": dict(self.before),
            "after": dict(self.after),
            "best_ds_config": self.best_config,
            "command": self.best_command or None,
            "diff": self.diff or None,
            "changes": [asdict(change) for change in self.changes],
            "confirmed": [asdict(confirmed) for confirmed in self.confirmed],
            "worths": [worth.model_dump(mode="json") for worth in self.worths],
            **own("searched", "max_trials", "stopped", "failed", "withdrawn", "seconds"),
            "running": [
                {"trial": number, "label": label, "waits_for": self.waiting.get(number)}
                for number, label in self.running.items()
            ],
            "trials": [_trial_document(trial) for trial in self.ranked],
            "facts": dict(self.facts),
            "why": [account.document() for account in self.why],
            "planned": None if self.planned is None else self.planned.document(),
        }


# What each change of the winner is worth.
WORTH_COLUMNS = ("change", "over yours without", "worth", "verdict")


def worth_rows(view: StudyView) -> list[tuple[str, ...]]:
    """The cells of `WORTH_COLUMNS` for each change."""
    return [
        (
            worth.name,
            worth.gain.times if worth.gain is not None else "-",
            "-" if worth.times is None else f">= {worth.times.low:.2f}x" if worth.of_search else worth.times.times,
            ": ".join(filter(None, (worth.verdict, "seen in the search" if worth.of_search else worth.reason))),
        )
        for worth in view.worths
    ]


def setting_text(value: Any) -> str:
    """A setting's value for people, such as `5,000,000`."""
    if isinstance(value, float) and value.is_integer():
        return f"{value:,.0f}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    return "-" if value is None else value if isinstance(value, str) else json.dumps(value)


def _trial_document(trial: TrialView) -> dict[str, Any]:
    return {
        **trial.row.model_dump(mode="json"),
        "arm": trial.arm,
        "started": trial.started,
        "ended": trial.ended,
        "settings": dict(trial.settings),
        "throughput_interval": None if trial.throughput is None else asdict(trial.throughput),
        "note": trial.note,
        "memory": None if trial.memory is None else asdict(trial.memory),
        "log": trial.log_path or None,
    }


View = TypeVar("View")


def shown_view(view: View, secrets: KnownSecrets | None) -> View:
    """A view or a record without secrets and control characters, at any depth. Names of settings stay."""
    shown: View = _shown(view, secrets)
    return shown


def _shown(value: Any, secrets: KnownSecrets | None) -> Any:
    if isinstance(value, str):
        if isinstance(value, Enum):
            return value
        return plain(value) if secrets is None else secrets.hide(plain(value))
    if isinstance(value, Mapping):
        return {_shown(name, None): _shown(inner, secrets) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_shown(inner, secrets) for inner in value)
    if isinstance(value, BaseModel):
        return value.model_copy(update={name: _shown(inner, secrets) for name, inner in value})
    if is_dataclass(value) and not isinstance(value, type):
        return replace(value, **{one.name: _shown(getattr(value, one.name), secrets) for one in fields(value)})
    return value


@dataclass(frozen=True)
class FailureGroup:
    outcome: Outcome  # of all of them
    reason: str  # that of the first trial. The others' differ only in numbers and paths.
    trials: tuple[TrialView, ...]  # in the order of their numbers

    @property
    def micro_batches(self) -> str:
        sizes = sorted({trial.row.micro_batch_size for trial in self.trials})
        return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"

    @property
    def arms(self) -> str:
        return ", ".join(sorted({trial.arm for trial in self.trials}))


def failure_groups(trials: Iterable[TrialView]) -> list[FailureGroup]:
    """The most frequent cause first."""
    groups: dict[tuple[Outcome, str], list[TrialView]] = {}
    for trial in trials:
        if not trial.completed:
            groups.setdefault((trial.row.outcome, cause_of(trial.row.reason)), []).append(trial)
    found = [FailureGroup(outcome, same[0].row.reason, tuple(same)) for (outcome, _), same in groups.items()]
    return sorted(found, key=lambda group: (-len(group.trials), group.trials[0].number))


# After this many trials the predictions hardly differ from the measurements.
_MOST_TRIALS = 400


def memory_views(
    base_config: Mapping[str, Any],
    candidates: Mapping[int, Candidate],
    results: Mapping[int, TrialResult],
    foreseen: Sequence[ForeseenArm] = (),
) -> dict[int, MemoryView]:
    """The prediction for each trial just before its result; nothing without a profile or a known device.

    `results` are in the order in which they came. The search began with the arms `foreseen`.
    """
    profiles = [(number, result) for number, result in results.items() if result.profile is not None]
    device = device_of(results.values())
    if not profiles or device not in MODELLED:
        return {}
    profiled, profile = profiles[0]
    assert profile.profile is not None
    switches = {place for candidate in candidates.values() for place in candidate.switches}
    slots = candidates[profiled].slots
    model = MemoryModel(MemoryBasis(profile.profile, base_config, slots, device, foreseen), switches)
    model.observe_profile(candidates[profiled], profile)
    views: dict[int, MemoryView] = {}
    for number, result in list(results.items())[:_MOST_TRIALS]:
        if result.purpose is Purpose.PROFILE:
            continue
        candidate = candidates[number]
        expected, left = model.above_initialize(candidate), model.available(candidate)
        completed = result.outcome is Outcome.COMPLETED
        if result.memory.available:
            left = min(result.memory.available)
        views[number] = MemoryView(
            predicted=Interval(expected.value, expected.low, expected.high),
            measured=measured_above_initialize(result.memory) if completed else None,
            budget=left,
        )
        model.observe(candidate, result)
    return views


def device_of(results: Iterable[TrialResult]) -> str:
    """`cuda` or `cpu`; empty if no trial recorded it. Older versions do not record it."""
    return next((result.trained_on for result in results if result.trained_on), "")
