"""Earlier studies of an experiment, as a new study keeps them when it opens.

They are written into the new study's folder. A resumed study sees them whatever happens to the other folders.
"""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from trial_lib.records.candidate import Candidate, Purpose
from trial_lib.records.frozen_record import FrozenRecord
from trial_lib.records.result import ModelProfile, Outcome, TrialResult
from trial_lib.records.study_folder import StudyPaths, StudyRecord, StudyStatus
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.confirm.finding import Confirmed, Finding
from trial_lib.study.earlier.fingerprint import Fingerprint
from trial_lib.study.kept.history import read_history
from trial_lib.study.state import StudyState
from trial_lib.wire.errors import InputError
from trial_lib.wire.whole_files import write_whole

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
    """A configuration that an earlier study has confirmed.

    Attributes:
        candidate: the configuration.
        trials: its confirming trials that completed.
    """

    candidate: Candidate
    trials: tuple[TrialResult, ...]

    @property
    def median(self) -> TrialResult:
        """The trial with the median throughput."""
        in_order = sorted(self.trials, key=lambda trial: trial.metrics["throughput"])
        return in_order[(len(in_order) - 1) // 2]


class EarlierStudy(FrozenRecord):
    """An earlier study.

    Attributes:
        study_id: its id.
        ended_at: seconds since the epoch.
        fingerprint: the experiment at that time.
        profile: the model, as its profile trial found it.
        own: the user's configuration; None if it did not complete.
        other: the best of the others.
        winner: which of the two the study chose.
        regressed: whether its winner was slower than the winner known before, beyond the noise.
        trials: the trials of its search. Older studies have none here.
    """

    study_id: str
    ended_at: float
    fingerprint: Fingerprint
    profile: ModelProfile
    own: EarlierConfirmed | None
    other: EarlierConfirmed
    winner: Literal["own", "other"]
    regressed: bool = False
    trials: tuple[KnownTrial, ...] = ()

    @property
    def best(self) -> EarlierConfirmed:
        """The winner."""
        return self.own if self.winner == "own" and self.own is not None else self.other


_STUDIES = TypeAdapter(tuple[EarlierStudy, ...])


def keep_earlier_studies(studies_dir: Path, name: str, arguments: StudyArguments, paths: StudyPaths) -> None:
    """Writes the earlier studies of an experiment into a new study's folder.

    Args:
        studies_dir: the folder that contains the studies.
        name: the experiment's.
        arguments: the new study's.
        paths: the new study's files.
    """
    found = find_earlier_studies(studies_dir, name, arguments)
    write_whole(paths.earlier_studies, _STUDIES.dump_json(found, exclude_defaults=True).decode())


def earlier_studies_of(paths: StudyPaths) -> tuple[EarlierStudy, ...]:
    """Returns the earlier studies of a study, oldest first; none if it does not learn."""
    if not paths.earlier_studies.exists():
        return ()
    return _STUDIES.validate_json(paths.earlier_studies.read_bytes())


def find_earlier_studies(studies_dir: Path, name: str, arguments: StudyArguments) -> tuple[EarlierStudy, ...]:
    """Returns the latest completed studies with the same question and a confirmed winner, oldest first."""
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
    """Yields the completed studies of a name, the latest first."""
    known = ((paths, record_of(paths)) for paths in map(StudyPaths, studies_dir.glob("*")))
    completed = [
        (paths, record)
        for paths, record in known
        if record is not None and record.name == name and record.status is StudyStatus.COMPLETED
    ]
    yield from sorted(completed, key=lambda pair: pair[1].ended_at or 0.0, reverse=True)


def record_of(paths: StudyPaths) -> StudyRecord | None:
    """Returns the record of a study; None if this version cannot read it."""
    try:
        return StudyRecord.model_validate_json(paths.record.read_text())
    except (OSError, ValueError):
        return None


def _is_same_question(record: StudyRecord, arguments: StudyArguments) -> bool:
    try:
        earlier = StudyArguments.model_validate(record.arguments)
    except ValidationError:
        return False
    return all(getattr(earlier, name) == getattr(arguments, name) for name in _QUESTION)


def _read(paths: StudyPaths, record: StudyRecord, with_trials: bool) -> EarlierStudy | None:
    """Returns a study.

    It is None if it confirmed nothing, is of several experiments, is damaged, or is of an older version.
    """
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
    completed = [trial for trial in known if is_measured(trial.result)]
    if not completed:
        return None
    return EarlierConfirmed(candidate=known[0].candidate, trials=tuple(_brief(trial).result for trial in completed))


def is_measured(result: TrialResult) -> bool:
    """Returns whether a trial has a throughput."""
    return result.outcome is Outcome.COMPLETED and result.metrics.get("throughput", 0.0) > 0.0


def _brief(trial: KnownTrial) -> KnownTrial:
    """Returns a trial without the parts that only its own study uses."""
    own_study_s: dict[str, object] = {
        "step_times": [],
        "losses": [],
        "logs": [],
        "imported": [],
        "profile": None,
        "program": None,
    }
    return KnownTrial(candidate=trial.candidate, result=trial.result.model_copy(update=own_study_s))


def trials_of(paths: StudyPaths) -> dict[int, KnownTrial]:
    """Returns the trials of a study that have ended, by their numbers.

    Raises:
        InputError: its history is damaged.
        KeyError: its history is of another version.
    """
    state = StudyState(read_history(paths.history))
    return {
        number: KnownTrial(candidate=state.candidates[number], result=result)
        for number, result in state.results.items()
    }


def levels_of(studies: Sequence[EarlierStudy]) -> list[EarlierStudy]:
    """Returns the last study and those right before it that measured the same winner under the same conditions.

    They end at a regression. Studies before it measured another level, which is not noise.
    """
    last = studies[-1]
    same: list[EarlierStudy] = []
    for study in reversed(studies):
        is_same = study.best.candidate == last.best.candidate
        if not is_same or set(study.fingerprint.changed_since(last.fingerprint)) - {"search"}:
            break
        same.append(study)
        if study.regressed:
            break
    return same[::-1]
