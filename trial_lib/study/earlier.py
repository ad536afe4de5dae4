"""Earlier studies of an experiment, as a new study keeps them when it opens.

They are written into the new study's folder. A resumed study sees them whatever happens to the other folders.
"""

import json
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.messages.statistics import largest_fall
from zerotune.trial_lib.records.candidate import Candidate, FrozenRecord, Purpose
from zerotune.trial_lib.records.folders import StudyPaths, StudyRecord, StudyStatus
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.base import SearchProblem
from zerotune.trial_lib.search.knobs import get_knob, leaves
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.confirmation import is_good
from zerotune.trial_lib.study.finding import Confirmed, Estimate, Finding
from zerotune.trial_lib.study.fingerprint import Fingerprint
from zerotune.trial_lib.study.folder import record_of
from zerotune.trial_lib.study.history import StudyState, read_history

# The arguments that are the study's question: they decide which configurations it may find, and how it measures them.
_QUESTION = (
    *("metric", "zero_stages", "max_slots", "max_micro_batch", "train_batch_size", "free_batch", "divisible_by"),
    *("memory_headroom", "start_profile_step", "end_profile_step"),
)
_MOST_STUDIES = 20
# The search of the latest of them is remembered trial by trial.
_MOST_SEARCHES = 3


class KnownTrial(FrozenRecord):
    """A trial of an earlier study. Its result holds only what a search learns from."""

    candidate: Candidate
    result: TrialResult


class EarlierConfirmed(FrozenRecord):
    candidate: Candidate  # the configuration
    trials: tuple[TrialResult, ...]  # its confirming trials that completed

    @property
    def median(self) -> TrialResult:
        in_order = sorted(self.trials, key=lambda trial: trial.metrics["throughput"])
        return in_order[(len(in_order) - 1) // 2]


class EarlierStudy(FrozenRecord):
    study_id: str  # its id
    ended_at: float  # seconds since the epoch
    fingerprint: Fingerprint  # the experiment at that time
    profile: ModelProfile  # the model, as its profile trial found it
    own: EarlierConfirmed | None  # the user's configuration; None if it did not complete
    other: EarlierConfirmed  # the best of the others
    winner: Literal["own", "other"]  # which of the two the study chose
    regressed: bool = False  # whether its winner was slower than the winner known before, beyond the noise
    trials: tuple[KnownTrial, ...] = ()  # the trials of its search. Older studies have none here.

    @property
    def best(self) -> EarlierConfirmed:
        return self.own if self.winner == "own" and self.own is not None else self.other


_STUDIES = TypeAdapter(tuple[EarlierStudy, ...])


def keep_earlier_studies(studies_dir: Path, name: str, arguments: StudyArguments, paths: StudyPaths) -> None:
    """Writes the earlier studies of the experiment of that name into a new study's folder."""
    found = find_earlier_studies(studies_dir, name, arguments)
    write_whole(paths.earlier_studies, _STUDIES.dump_json(found, exclude_defaults=True).decode())


def earlier_studies_of(paths: StudyPaths) -> tuple[EarlierStudy, ...]:
    """The earlier studies of a study, oldest first; none if it does not learn."""
    if not paths.earlier_studies.exists():
        return ()
    return _STUDIES.validate_json(paths.earlier_studies.read_bytes())


def find_earlier_studies(studies_dir: Path, name: str, arguments: StudyArguments) -> tuple[EarlierStudy, ...]:
    """The latest completed studies with the same question and a confirmed winner, oldest first."""
    found: list[EarlierStudy] = []
    for paths, record in _records(studies_dir, name):
        if _is_same_question(record, arguments):
            searches = sum(bool(study.trials) for study in found)
            study = _read(paths, record, with_trials=searches < _MOST_SEARCHES)
            if study is not None:
                found.append(study)
        if len(found) == _MOST_STUDIES:
            break
    return tuple(reversed(found))


def _records(studies_dir: Path, name: str) -> Iterator[tuple[StudyPaths, StudyRecord]]:
    known = ((paths, record_of(paths)) for paths in map(StudyPaths, studies_dir.glob("*")))
    completed = [
        (paths, record)
        for paths, record in known
        if record is not None and record.name == name and record.status is StudyStatus.COMPLETED
    ]
    yield from sorted(completed, key=lambda pair: pair[1].ended_at or 0.0, reverse=True)


def _is_same_question(record: StudyRecord, arguments: StudyArguments) -> bool:
    try:
        earlier = StudyArguments.model_validate(record.arguments)
    except ValidationError:
        return False
    return all(getattr(earlier, name) == getattr(arguments, name) for name in _QUESTION)


def _read(paths: StudyPaths, record: StudyRecord, with_trials: bool) -> EarlierStudy | None:
    # None if it confirmed nothing, is of several experiments, is damaged, or is of an older version.
    try:
        fingerprint = Fingerprint.model_validate_json(paths.fingerprint.read_text())
        answer = json.loads(paths.best_ds_metrics.read_text())
        finding = None if answer["confirmation"] is None else Finding.of_document(answer["confirmation"])
        trials = trials_of(paths)
    except (OSError, ValueError, KeyError, InputError):
        return None
    if fingerprint.is_mixed:
        return None
    profiled = next((trial.result for trial in trials.values() if trial.result.purpose is Purpose.PROFILE), None)
    if finding is None or finding.winner is None or profiled is None or profiled.profile is None:
        return None
    is_own = finding.winner.verdict == "own"
    rival = next((one for one in finding.candidates if one.number is not None), None) if is_own else finding.winner
    own = None if finding.own is None else _measured(finding.own, trials)
    other = None if rival is None else _measured(rival, trials)
    if other is None or (is_own and own is None):
        return None
    searched = [trial for trial in trials.values() if trial.result.purpose in (Purpose.SUBMITTED, Purpose.SEARCH)]
    return EarlierStudy(
        study_id=record.study_id,
        ended_at=record.ended_at or 0.0,
        fingerprint=fingerprint.with_profile(profiled),
        profile=profiled.profile,
        own=own,
        other=other,
        winner="own" if is_own else "other",
        regressed=bool(record.regression),
        trials=tuple(map(_brief, searched)) if with_trials else (),
    )


def _measured(confirmed: Confirmed, trials: dict[int, KnownTrial]) -> EarlierConfirmed | None:
    known = [trials[number] for number in confirmed.trials if number in trials]
    completed = [trial for trial in known if is_good(trial.result, "throughput")]
    if not completed:
        return None
    return EarlierConfirmed(candidate=known[0].candidate, trials=tuple(_brief(trial).result for trial in completed))


def _brief(trial: KnownTrial) -> KnownTrial:
    # A trial without the parts that only its own study uses.
    unused: dict[str, Any] = {"profile": None, "program": None, "weight_change": None}
    unused |= {name: [] for name in ("step_times", "losses", "gradient_norms", "logs", "imported")}
    brief = replace(trial.result, **unused)
    return KnownTrial(candidate=trial.candidate, result=brief)


def trials_of(paths: StudyPaths) -> dict[int, KnownTrial]:
    """The trials of a study that have ended, by their numbers.

    Raises InputError if its history is damaged, and KeyError if that is of another version.
    """
    state = StudyState(read_history(paths.history))
    return {
        number: KnownTrial(candidate=state.candidates[number], result=result)
        for number, result in state.results.items()
    }


# What earlier studies give to a search

# The activations of a sample may differ by this share between runs of the same model, because its data differ.
_SAME_ACTIVATIONS = 0.01
# The sections that may have changed if a trial's speed, or its memory, is still valid.
_SAME_SPEED = {"search"}
_SAME_MEMORY = {"search", "code", "measuring"}
_TELLS_OF_MEMORY = (Outcome.COMPLETED, Outcome.OUT_OF_MEMORY)


@dataclass(frozen=True)
class HeadStart:
    """What earlier studies of an experiment tell of it before its search."""

    earlier: tuple[EarlierStudy, ...]  # the studies that this one may learn from, oldest first
    begun: Fingerprint  # the experiment when this study began
    profile: TrialResult | None  # the profile trial; None before it has ended

    @property
    def last(self) -> EarlierStudy | None:
        return self.earlier[-1] if self.earlier else None

    @property
    def now(self) -> Fingerprint:
        """The experiment now, as far as it is known."""
        return self.begun if self.profile is None else self.begun.with_profile(self.profile)

    @property
    def has_changed(self) -> bool:
        """Whether a known part of the experiment has changed since the last study. The profile trial has ended."""
        return self.last is None or bool(self.now.changed_since(self.last.fingerprint))

    def since_last(self, results: Mapping[int, TrialResult], winner: "Confirmed", device: str) -> "SinceLast | None":
        """This study's winner beside that of the last one."""
        return since_last(self.earlier, self.now, results, winner, device)

    def winner(self, problem: SearchProblem) -> Candidate | None:
        """The first candidate of a search: the last study's winner, with this study's slots and global batch.

        None if there is no winner, if it is the user's configuration or outside the search's space, and if its
        micro-batch size does not divide the global batch or is another than the program's only one.
        """
        last = self.last
        if last is None or last.winner == "own":
            return None
        known, replicas = last.other.candidate, problem.replicas.of(last.other.candidate.knobs)
        knobs = _in_space(known, problem)
        if knobs is None:
            return None
        if problem.only_micro_batch not in (None, known.micro_batch_size):
            return None
        accumulation = known.gradient_accumulation_steps
        if problem.train_batch_size is not None:
            accumulation, left = divmod(problem.train_batch_size, known.micro_batch_size * replicas)
            if left or not accumulation:
                return None
        return Candidate(
            knobs=knobs,
            micro_batch_size=known.micro_batch_size,
            gradient_accumulation_steps=accumulation,
            slots=problem.slots,
            data_parallel_size=replicas,
        )

    def trials(self) -> list[tuple[Candidate, TrialResult]]:
        """The trials of earlier studies that are still valid, oldest first, for a search to learn from.

        A trial is valid as a whole if only the search itself has changed. If the code has changed but the model needs
        the same memory, only the trial's memory is valid. After any other change nothing is. Failures for lack of host
        memory are never valid, because the host's free memory varies.
        """
        known: list[tuple[Candidate, TrialResult]] = []
        # If nothing has changed but the known winner is slower than before, the other results are doubtful as
        # well.
        is_doubtful = not self.has_changed
        for study in self.earlier:
            changed = set(self.now.changed_since(study.fingerprint))
            if changed <= _SAME_SPEED and not is_doubtful:
                known += [
                    (trial.candidate, trial.result)
                    for trial in study.trials
                    if trial.result.outcome is not Outcome.OUT_OF_HOST_MEMORY
                ]
            elif changed <= _SAME_MEMORY and self._needs_the_same(study):
                known += [
                    (trial.candidate, replace(trial.result, metrics={}))
                    for trial in study.trials
                    if trial.result.outcome in _TELLS_OF_MEMORY
                ]
        return known

    @property
    def _model(self) -> ModelProfile | None:
        return None if self.profile is None else self.profile.profile

    def _needs_the_same(self, study: EarlierStudy) -> bool:
        if self._model is None:
            return False
        before, now = study.profile.activation_mem_per_gpu, self._model.activation_mem_per_gpu
        return abs(now - before) <= _SAME_ACTIVATIONS * before


# The winner's throughput beside the last known one

# The variation of one configuration from study to study (standard deviation, a share) while too few studies show it.
# Other programs use a processor's caches and a host's time, but seldom a GPU.
_GPU, _CPU = 0.01, 0.10
_NEGLIGIBLE = 0.02  # A smaller change is not reported, however surely it is measured.


class SinceLast(FrozenRecord):
    """A study's winner beside the level that earlier studies held."""

    last_study_id: str  # the last study, or the last one that held the level
    last_ended_at: float  # when it ended, in seconds since the epoch
    held_by: int = 1  # how many studies held the level
    fallen: int = 1  # how many studies are compared with it: this one, and those before it
    throughput: float  # of the winner (samples/s), the median of its confirming trials
    last_throughput: float  # of the compared winners, likewise
    # The throughput of the later divided by that of the earlier. None if the earlier ones were measured in another way.
    ratio: Estimate | None
    is_regression: bool  # whether the later are below the earlier beyond the noise
    changes: tuple[str, ...]  # the changes of the experiment between the two studies

    @property
    def sentence(self) -> str:
        if self.ratio is None:
            return (
                f"{self.throughput:.4g} samples/s. The earlier studies' figures came about in another way, so they are "
                f"not compared, and the history begins anew. {self._changes}"
            )
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last_ended_at))
        beside = "below" if self.is_regression else "beside"
        level = f"the last known {self.last_throughput:.4g} samples/s ({self.last_study_id}, {day})"
        if self.held_by > 1:
            level = (
                f"the {self.last_throughput:.4g} samples/s that {self.held_by} studies held "
                f"until {self.last_study_id} ({day})"
            )
        later = f", the last of {self.fallen} studies" if self.fallen > 1 else ""
        return (
            f"{self.throughput:.4g} samples/s{later}, {beside} {level}: {self.ratio.times}, "
            f"compared by throughput. {self._changes}"
        )

    @property
    def _changes(self) -> str:
        if not self.changes:
            return "ZeroTune knows of no change between them."
        return f"Changed between them: {'; '.join(self.changes)}."

    def document(self) -> dict[str, object]:
        return {"sentence": self.sentence, **self.model_dump(mode="json")}


def since_last(
    earlier: Sequence[EarlierStudy],
    fingerprint: Fingerprint,
    results: Mapping[int, TrialResult],
    winner: Confirmed,
    device: str,
) -> SinceLast | None:
    """A winner beside the level that studies held; None if there is no such study, or nothing to compare.

    The clock decides, as in a confirmation. Only studies that measured in the same way are compared.
    """
    now = [results[number] for number in winner.trials if is_good(results[number], "throughput")]
    if not earlier or not now:
        return None
    way = fingerprint.measuring, _moved(now)
    alike = [study for study in earlier if (study.fingerprint.measuring, _moved(study.best.trials)) == way]
    # Whatever has changed: a fall counts from the best level since the last one that was told.
    held = alike[max((place for place, study in enumerate(alike) if study.regressed), default=0) :]
    levels = [*(_throughputs(study.best.trials) for study in held), _throughputs(now)]
    unknown = with_data(_CPU if kind_of(device).computes_on_the_processor else _GPU, levels)
    reference, fallen, ratio, is_regression = earlier[-1:], 1, None, False
    if held:
        fall = largest_fall(levels, unknown)
        is_regression = fall.ratio.high < 1.0 and fall.ratio.value <= 1.0 - _NEGLIGIBLE
        if not is_regression:
            fall = largest_fall(levels, unknown, earliest=len(held))
        reference, fallen = held[fall.first : fall.begin], len(levels) - fall.begin
        ratio = Estimate(value=fall.ratio.value, low=fall.ratio.low, high=fall.ratio.high)
    return SinceLast(
        last_study_id=reference[-1].study_id,
        last_ended_at=reference[-1].ended_at,
        held_by=len(reference),
        fallen=fallen,
        throughput=_throughput(now),
        last_throughput=statistics.median(_throughput(study.best.trials) for study in reference),
        ratio=ratio,
        is_regression=is_regression,
        changes=tuple(fingerprint.changes_since(reference[-1].fingerprint)),
    )


def _moved(trials: Sequence[TrialResult]) -> bool:
    # Whether their data began elsewhere in each round. First batches may be faster than the rest.
    return all(trial.data_offset is not None for trial in trials)


def with_data(unknown: float, levels: Sequence[Sequence[float]]) -> float:
    """What a level may differ from night to night, as a share, beside what the machine does.

    Each round has other data, and a study may have other rounds than the next.
    """
    scatters = [statistics.variance(map(math.log, values)) / len(values) for values in levels if len(values) > 1]
    return math.sqrt(unknown**2 + (statistics.fmean(scatters) if scatters else 0.0))


def _in_space(candidate: Candidate, problem: SearchProblem) -> dict[str, Any] | None:
    # The knobs of a candidate as the space has them. A winner has only those that it needs.
    space = problem.space
    place = space.locate(candidate.knobs) or space.locate_config(candidate.complete(problem.base_config))
    knobs = None if place is None else space.arms[place[0]].family(place[1])
    has_all = knobs is not None and all(get_knob(knobs, path) == value for path, value in leaves(candidate.knobs))
    return knobs if has_all else None


def _throughput(trials: Sequence[TrialResult]) -> float:
    return statistics.median(_throughputs(trials))


def _throughputs(trials: Sequence[TrialResult]) -> list[float]:
    return [trial.metrics["throughput"] for trial in trials]
