"""A study as plain data. The report, the terminal and `--json` all show this."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from trial_lib.command.switches import is_switch, place_of
from trial_lib.records.candidate import Purpose
from trial_lib.records.planned_trials import PlannedTrials
from trial_lib.records.result import Outcome
from trial_lib.records.step_account import StepAccount
from trial_lib.report.leaderboard import LeaderboardRow

INTERRUPTED = "interrupted"


@dataclass(frozen=True)
class Interval:
    """A value with the ends of its interval. Both are the value itself if the interval is unknown."""

    value: float
    low: float
    high: float

    @property
    def has_ends(self) -> bool:
        """Whether the interval is known."""
        return self.low < self.high


@dataclass(frozen=True)
class MemoryView:
    """The memory that a trial's steps took above initialisation, in bytes on the rank that took most.

    Attributes:
        predicted: the memory model's prediction just before the trial's result, with its 90 % interval.
        measured: the measured value. None if the trial did not complete.
        budget: what initialisation left for the steps. None if nothing limits a slot.
    """

    predicted: Interval
    measured: int | None
    budget: int | None


@dataclass(frozen=True)
class TrialView:
    """A trial that has ended.

    Attributes:
        row: as in the leaderboard.
        arm: its ZeRO stage and offload, such as `z3-offload-optimizer`.
        settings: the varied settings of the trial's complete configuration, by dotted path.
        started: seconds since the study began.
        ended: seconds since the study began.
        throughput: samples/s, with the range of the middle half of its own steps. None if it measured none.
        memory: None for the profile trial, and without a prediction.
        note: the limits of its measurement. Mostly empty.
        log: the end of its program's output, without secrets.
        log_path: the file of the whole log, within the study's folder. Empty if there is none.
    """

    row: LeaderboardRow
    arm: str
    settings: Mapping[str, Any]
    started: float
    ended: float
    throughput: Interval | None
    memory: MemoryView | None
    note: str
    log: str
    log_path: str

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.row.trial

    @property
    def completed(self) -> bool:
        """Whether it completed its measurement."""
        return self.row.outcome is Outcome.COMPLETED

    @property
    def is_profile(self) -> bool:
        """Whether it is the profile trial, which is not compared with the others."""
        return self.row.purpose is Purpose.PROFILE


@dataclass(frozen=True)
class ConfirmedView:
    """A configuration that was measured again in fresh processes.

    Attributes:
        name: for people.
        verdict: as in `Finding`; `own` for the user's configuration.
        trials: the numbers of its confirming trials.
        micro_batch_size: samples.
        throughput: samples/s, the median over the fresh processes; the interval is the study's metric's.
        gain: over the user's configuration. None if there is nothing to compare.
        is_winner: whether it is the answer.
        note: why it failed, or the result of comparing its losses.
    """

    name: str
    verdict: str
    trials: tuple[int, ...]
    micro_batch_size: int
    throughput: Interval | None
    gain: Interval | None
    is_winner: bool
    note: str


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
        """Whether it is a switch of the program."""
        return is_switch(self.setting)


@dataclass(frozen=True)
class StudyView:
    """One study: running, ended or cut short.

    Attributes:
        study_id: as in its record.
        name: of the experiment.
        folder: absolute.
        status: of its record. `interrupted` if that says running, but no process drives the study.
        reason: why it failed or was cut short. Empty otherwise.
        regression: how far the winner is behind that of the last study. Empty if it is not.
        method: the search method.
        metric: the optimised metric.
        unit: of the metric.
        smaller_is_better: its direction.
        headline: the answer in a sentence, or the state of the study.
        notes: how the answer was found, and further remarks.
        gain: how many times better than the user's configuration the winner is.
        gain_interval: its ends. None if it was not confirmed.
        best_number: the winning trial.
        before: the metrics of the user's configuration, by name. Empty if it was not measured.
        after: the metrics of the winner, by name. Empty without one.
        best_config: the winner's DeepSpeed configuration, without secrets.
        best_command: the command to train with it.
        changes: its changes to the user's configuration.
        trials: the ended trials, in the order of their numbers.
        running: the running trials, with their names.
        withdrawn: sizes of sweeps that were not measured after all.
        stopped: why the search ended. Empty before its end.
        max_trials: the budget of the search.
        searched: trials of that budget that are spent.
        failed: trials that did not complete.
        seconds: from the start to the end, or until now.
        started_at: seconds since the epoch.
        confirmed: the configurations that were measured again, the user's first.
        facts: its circumstances by name: versions, hosts, the model, the arguments.
        planned: what the plan foresaw that the study began with. None without one, or before a trial has ended.
        why: where the time of a step goes, the winner's first. Empty before the answer.
        waiting: what those of the running trials wait for that have no slots yet.
    """

    study_id: str
    name: str
    folder: str
    status: str
    reason: str
    regression: str
    method: str
    metric: str
    unit: str
    smaller_is_better: bool
    headline: str
    notes: tuple[str, ...]
    gain: float | None
    gain_interval: tuple[float, float] | None
    best_number: int | None
    before: Mapping[str, float]
    after: Mapping[str, float]
    best_config: Mapping[str, Any] | None
    best_command: str
    changes: tuple[SettingChange, ...]
    trials: tuple[TrialView, ...]
    running: Mapping[int, str]
    withdrawn: int
    stopped: str
    max_trials: int
    searched: int
    failed: int
    seconds: float
    started_at: float
    confirmed: tuple[ConfirmedView, ...]
    facts: Mapping[str, str]
    planned: PlannedTrials | None = None
    why: tuple[StepAccount, ...] = ()
    waiting: Mapping[int, str] = field(default_factory=dict)

    @property
    def ranked(self) -> list[TrialView]:
        """The trials: completed ones with the best first, then the others in order, the profile trial last."""
        sign = 1.0 if self.smaller_is_better else -1.0

        def place(trial: TrialView) -> tuple[bool, bool, float, int]:
            value = trial.row.value
            return trial.is_profile, value is None, 0.0 if value is None else sign * value, trial.number

        return sorted(self.trials, key=place)

    def document(self) -> dict[str, Any]:
        """Returns the view as JSON. It shares the names of `zerotune METHOD --json`."""
        best = next((trial for trial in self.trials if trial.number == self.best_number), None)
        return {
            "study": self.study_id,
            "name": self.name,
            "folder": self.folder,
            "status": self.status,
            "reason": self.reason,
            "regression": self.regression,
            "method": self.method,
            "metric": self.metric,
            "headline": self.headline,
            "notes": list(self.notes),
            "gain": self.gain,
            "gain_interval": self.gain_interval,
            "best": None if best is None else _trial_document(best),
            "before": dict(self.before),
            "after": dict(self.after),
            "best_ds_config": self.best_config,
            "command": self.best_command or None,
            "changes": [asdict(change) for change in self.changes],
            "confirmed": [asdict(confirmed) for confirmed in self.confirmed],
            "searched": self.searched,
            "max_trials": self.max_trials,
            "stopped": self.stopped,
            "failed": self.failed,
            "withdrawn": self.withdrawn,
            "seconds": self.seconds,
            "running": [
                {"trial": number, "label": label, "waits_for": self.waiting.get(number)}
                for number, label in self.running.items()
            ],
            "trials": [_trial_document(trial) for trial in self.ranked],
            "facts": dict(self.facts),
            "why": [account.document() for account in self.why],
            "planned": None if self.planned is None else self.planned.document(),
        }


def setting_text(value: Any) -> str:
    """Returns a setting's value for people, such as `5,000,000`."""
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
