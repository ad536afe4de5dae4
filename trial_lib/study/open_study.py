"""Opening a study, with its folder, lock, starter and tracker, and closing all of them."""

import contextlib
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from zerotune.trial_lib.launch.locks import host_lock_dir
from zerotune.trial_lib.launch.trial import Place, ThisHost
from zerotune.trial_lib.launch.trial_files import uncovered
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.records.folders import (
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
    work_dir_of,
)
from zerotune.trial_lib.study.arguments import INSTEAD, StudyArguments
from zerotune.trial_lib.study.beside import require_a_switch, require_found_switch
from zerotune.trial_lib.study.config_refused import ConfigCheck
from zerotune.trial_lib.study.confirm import answer_of, headline_of, reason_of, since_last_study
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.earlier import keep_earlier_studies
from zerotune.trial_lib.study.fingerprint import Fingerprint, fingerprint_in, fingerprint_of
from zerotune.trial_lib.study.folder import (
    FinishedError,
    FolderError,
    as_kept,
    folder_error_told,
    is_damaged,
    new_folder,
    provenance,
    read_record,
    read_wrapper,
    remove_folder,
    write_wrapper,
)
from zerotune.trial_lib.study.limits import supposed_ops
from zerotune.trial_lib.study.program import KnownProgram, named_in, require_sizes, require_switchable
from zerotune.trial_lib.study.run import HeldFolder, OpenRun, hold_folder
from zerotune.trial_lib.study.setup import StudySetup, cluster_of, kept_setup, new_setup, starter_of
from zerotune.trial_lib.study.study_plan import GivenPlan, keep_plan, read_given_plan
from zerotune.trial_lib.tracking.tracking_uri import default_tracking_uri

_BEGUN_END_S = 5.0  # for the end of a profile trial whose ranks have been ended


class OpenStudy(OpenRun[StudyRecord, StudyPaths]):
    def __init__(
        self,
        held: HeldFolder[StudyRecord],
        paths: StudyPaths,
        driver: StudyDriver,
        config_check: ConfigCheck,
        is_new: bool,
    ) -> None:
        super().__init__(held, paths)
        self.driver = driver
        self.config_check = config_check
        self.is_new = is_new  # opened for the first time

    def remove(self) -> None:
        """Closes a study and removes its folder, and the folder of all studies if no other is in it."""
        self.close()
        # An interrupt has nothing to write any more.
        self.record = self.record.model_copy(update={"status": StudyStatus.FAILED})
        remove_folder(self.paths.root, self.driver.log)

    def begin(self) -> None:
        super().begin()
        self.driver.prime()

    def profiled(self) -> None:
        """Writes the metric that the study goes by, and checks the switches. The profile trial may have replaced it."""
        self.driver.advice.tell_plan(has_search=self.driver.search is not None)
        file = self.driver.setup.arguments.config_path
        require_switchable(self.record.switches, self.driver.known.found, file)
        if self.driver.setup.arguments.beside:
            require_found_switch(self.driver.known.found)
        require_sizes(self.driver.known.switches, self.driver.known.layouts, named_in(file))
        if self.record.metric != self.driver.metric:
            self.driver.log.warning("%s", INSTEAD)
            self._update()

    def finish(self, status: StudyStatus, reason: str = "") -> None:
        """Writes how the study ended. If the disk is full, the record stays as it was, and the study can be resumed."""
        answer = answer_of(self.driver)
        compared = since_last_study(self.driver) if status is StudyStatus.COMPLETED else None
        with contextlib.suppress(FolderError):
            self._update(
                status=status,
                reason=reason_of(self.driver, status, reason),
                ended_at=time.time(),
                best_number=None if answer is None else answer.best.number,
                gain=None if answer is None else answer.gain,
                gain_interval=None if answer is None else answer.gain_interval,
                finding=headline_of(self.driver, status),
                regression=compared.sentence if compared is not None and compared.is_regression else "",
            )

    def interrupt(self) -> None:
        """Ends the trials as well."""
        super().interrupt()
        self.driver.cancel()

    def close(self) -> bool:
        """Ends everything that runs, and waits a while for the tracking server. Returns whether that has everything."""
        if self._closed:
            return True
        self._closed = True
        self.driver.cancel()
        self.driver.place.close()
        self.driver.await_begun(_BEGUN_END_S)
        try:
            return self._close_tracker()
        finally:
            self._lock.release()
            self.is_down = True

    def _update(self, **changes: object) -> None:
        with folder_error_told(self.paths.root):
            super()._update(metric=self.driver.metric, **changes)


def new_study(
    arguments: StudyArguments,
    work_dir: Path,
    flow_run_id: str | None = None,
    tell: Callable[[str], None] = lambda sentence: None,
) -> OpenStudy:
    """Raises InputError if the arguments, the experiment or this host do not fit. Nothing was written then.

    If its command is a wrapper, the study is of the command that the wrapper starts. `tell` gets a sentence when
    something takes long, before the study has a log.
    """
    return open_planned(plan_study(arguments, work_dir, tell), flow_run_id)


@dataclass(frozen=True)
class PlannedStudy:
    """A study that can begin. Nothing of it has been started or written."""

    setup: StudySetup
    fingerprint: Fingerprint
    plan: GivenPlan | None = None


def plan_study(
    arguments: StudyArguments,
    work_dir: Path,
    tell: Callable[[str], None] = lambda sentence: None,
    check: Callable[[], None] = lambda: None,
) -> PlannedStudy:
    """Checks a new study as `new_setup` does, and the plan that it begins with."""
    setup = new_setup(arguments, work_dir, tell, check)
    if arguments.beside:
        require_a_switch(setup.experiment)
    given, submitted = arguments.plan, setup.experiment.ds_config
    plan = None if given is None else read_given_plan(given, setup.host, setup.slots, submitted, arguments.zero_stages)
    return PlannedStudy(setup, fingerprint_of(setup), plan)


def open_planned(planned: PlannedStudy, flow_run_id: str | None = None) -> OpenStudy:
    setup, fingerprint = planned.setup, planned.fingerprint
    experiment, arguments, paths = setup.experiment, setup.arguments, setup.paths
    tracking_uri = default_tracking_uri(work_dir_of(paths.root))
    new_folder(paths.trials, "study", experiment, paths.experiment)
    with folder_error_told(paths.root):
        write_whole(paths.fingerprint, fingerprint.model_dump_json(indent=2))
        write_wrapper(paths, experiment.entrypoint.wrapper)
        if arguments.from_earlier:
            keep_earlier_studies(paths.root.parent, experiment.name, arguments, paths)
        if planned.plan is not None:
            keep_plan(*planned.plan, paths.plan)
    known = KnownProgram.of(experiment, setup.environment)
    record = StudyRecord(
        study_id=setup.study_id,
        name=experiment.name,
        method=arguments.method,
        metric=arguments.metric,
        arguments=as_kept(arguments),
        model_dir=str(experiment.model_dir),
        **provenance(experiment.model_dir),
        ds_config=experiment.ds_config,
        switches=known.switches,
        layouts=dict(known.layouts),
        started_at=time.time(),
        flow_run_id=flow_run_id,
    )
    study = _open(record, setup, tracking_uri, is_new=True)
    if fingerprint.is_cut_off:
        study.driver.log.warning("There is more code than a study hashes, so some changes will not be noticed.")
    return study


def resume_study(root: Path) -> OpenStudy:
    """Raises FinishedError if nothing of it is left to do, and InputError if it cannot be resumed."""
    paths = StudyPaths(root.absolute())
    record = read_record(paths)
    try:
        arguments = StudyArguments.model_validate(record.arguments)
    except ValidationError as error:
        raise InputError(
            is_damaged("the study's record", error), where=str(paths.record), remedy="Start a new study."
        ) from None
    if record.status is StudyStatus.COMPLETED:
        if not arguments.run_full_experiment or _has_trained(paths):
            raise FinishedError(
                "this study has finished.",
                where=str(root),
                remedy=f"Its answer is {paths.best_ds_config.name} there; start a new study to search on.",
            )
        # No trial is left to run, so a fork server has nothing to do.
        arguments = arguments.model_copy(update={"start": "cold"})
    setup = kept_setup(record.study_id, arguments, paths, read_wrapper(paths), record.ds_config)
    is_over = record.status is StudyStatus.COMPLETED
    changed = "" if is_over else _changes(fingerprint_in(paths), fingerprint_of(setup))
    study = _open(record, _with_notes(setup, after=changed), default_tracking_uri(work_dir_of(paths.root)))
    if changed:
        study.driver.log.warning("%s", changed)
        mixed = fingerprint_in(paths).model_copy(update={"is_mixed": True})
        with folder_error_told(paths.root):
            # Later studies then learn nothing from this one.
            write_whole(paths.fingerprint, mixed.model_dump_json(indent=2))
    return study


def _changes(begun: Fingerprint, now: Fingerprint) -> str:
    # A sentence on the changes of the experiment since the study began; empty if there are none.
    changes = "; ".join(now.changes_since(begun))
    # A study of an older version has no fingerprint.
    if not changes or begun == Fingerprint():
        return ""
    return (
        f"changed since the study began: {changes}. Its earlier trials were measured before that, so results may not "
        "be comparable. Start a new study to be safe."
    )


def _has_trained(paths: StudyPaths) -> bool:
    record = FullExperimentPaths(paths.full_experiment.root).record
    with contextlib.suppress(FileNotFoundError, ValueError):
        return FullExperimentRecord.model_validate_json(record.read_text()).status is StudyStatus.COMPLETED
    return False


def _open(record: StudyRecord, setup: StudySetup, tracking_uri: str, is_new: bool = False) -> OpenStudy:
    paths, over_ray = setup.paths, setup.arguments.ray_address is not None
    # From here on `resume` finds the study, however this process ends.
    with folder_error_told(paths.root):
        held = hold_folder(paths, record, tracking_uri)
    log, hosts = held.log, setup.experiment.config.resources.hosts
    uncovered_by = uncovered(setup.experiment.model_dir, paths.root, over_ray or bool(hosts))
    first = tuple(filter(None, (uncovered_by, held.copied)))
    for text in first:
        log.warning("%s", text)
    # A copy of a study has an id of its own.
    setup = replace(_with_notes(setup, *first), study_id=held.record.id)
    ops = supposed_ops(setup.experiment, setup.arguments, setup.device)
    place: Place
    starter = None
    if over_ray:
        place = cluster_of(setup, ops, log.info)
    else:
        starter = starter_of(setup, ops, log.info)
        place = ThisHost(starter, setup.host, host_lock_dir(), is_one=not hosts)
    driver = StudyDriver(setup, place, log)
    # A study with only its training left has its answer.
    asked = None if record.status is StudyStatus.COMPLETED else starter
    check = ConfigCheck(setup.experiment, asked, log)
    return OpenStudy(held, paths, driver, check, is_new)


def _with_notes(setup: StudySetup, *before: str, after: str = "") -> StudySetup:
    notes = (*before, *setup.experiment.notes, *filter(None, [after]))
    return replace(setup, experiment=replace(setup.experiment, notes=notes))


def require_accepted_config(
    study: OpenStudy,
    wait: Callable[[Callable[[], InputError | None]], InputError | None] = lambda work: work(),
) -> None:
    """Waits for DeepSpeed's answer about the configuration of a study of which nothing runs yet.

    Raises InputError if DeepSpeed refuses it. The study is closed, and the folder of a new one is removed.
    """
    refusal = wait(study.config_check.refusal)
    if refusal is None:
        return
    if study.is_new:
        study.remove()
    else:
        study.finish(StudyStatus.FAILED, str(refusal))
        study.close()
    raise refusal
