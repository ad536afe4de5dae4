"""Opening a study, with its folder, lock, starter and tracker, and closing all of them."""

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from pydantic import ValidationError

from trial_lib.device.base import Host
from trial_lib.device.this_host import kind_of, this_host
from trial_lib.inputs.known_secrets import KnownSecrets, keep_secret, known_here
from trial_lib.inputs.read_experiment import Experiment, read_experiment
from trial_lib.launch.locks import host_lock_dir, own_folder
from trial_lib.launch.place import Place, ThisHost
from trial_lib.launch.trial_files import uncovered
from trial_lib.messages.errors import InputError
from trial_lib.messages.files import write_whole
from trial_lib.plan.devices import device_speeds
from trial_lib.plan.plan_record import PlanPaths, PlanRecord
from trial_lib.records.folders import (
    STUDIES,
    FullExperimentPaths,
    FullExperimentRecord,
    StudyPaths,
    StudyRecord,
    StudyStatus,
    work_dir_of,
)
from trial_lib.study.arguments import INSTEAD, StudyArguments
from trial_lib.study.choose_place import cluster_of, slots_for, starter_of
from trial_lib.study.config_refused import ConfigCheck
from trial_lib.study.confirm import answer_of, headline_of, reason_of, since_last_study
from trial_lib.study.driver import StudyDriver
from trial_lib.study.earlier import keep_earlier_studies
from trial_lib.study.fingerprint import Fingerprint, fingerprint_in, fingerprint_of
from trial_lib.study.folder import (
    FinishedError,
    FolderError,
    folder_error_told,
    is_damaged,
    new_folder,
    new_id,
    read_record,
    read_wrapper,
    remove_folder,
    write_wrapper,
)
from trial_lib.study.followed import Followed, followed
from trial_lib.study.program import KnownProgram, environment_of, named_in, require_sizes, require_switchable
from trial_lib.study.run import HeldFolder, OpenRun, hold_folder
from trial_lib.study.setup import StudySetup
from trial_lib.study.study_plan import keep_plan, read_given_plan
from trial_lib.study.typed_command import read_command
from trial_lib.tracking.tracking_uri import default_tracking_uri

# Checks before a study, or a full experiment, has a folder.


def check_slots(experiment: Experiment, host: Host) -> None:
    """Raises InputError if this host has too few slots for an experiment, or they cannot be locked."""
    own_folder(host_lock_dir())
    slots = experiment.config.resources.slots_per_trial
    if slots > len(host.slots):
        if experiment.config.follow_launcher:
            raise InputError(
                f"it starts {slots} ranks, but there are {len(host.slots)} {host.device} slot(s) for it.",
                where=experiment.source,
                remedy="Ask the launcher for fewer.",
            )
        raise InputError(
            f"slots_per_trial is {slots}, but this host has {len(host.slots)} {host.device} slot(s).",
            where=experiment.source,
            remedy=f"Set resources.slots_per_trial to at most {len(host.slots)}.",
        )
    refusal = kind_of(host.device).refusal(host, slots)
    if refusal is not None:
        raise InputError(
            refusal,
            where=experiment.source,
            remedy="Start one rank." if experiment.config.follow_launcher else "Set resources.slots_per_trial to 1.",
        )


def check_include(include: Sequence[Path]) -> None:
    """Raises InputError if a file or folder to include does not exist."""
    for path in include:
        if not path.exists():
            raise InputError(
                "this does not exist.", where=f"--include {path}", remedy="Name an existing file or folder."
            )


def check_length(experiment: Experiment) -> None:
    """Raises InputError if a trial class has no length to train at full length."""
    if experiment.entrypoint.trial_class is not None and experiment.config.searcher.max_length is None:
        raise InputError(
            "searcher.max_length is missing, and a full experiment of a trial class trains that long.",
            where=experiment.source,
            remedy="Add `searcher: {max_length: {batches: 1000}}`, or so many epochs or records.",
        )


_BEGUN_END_S = 5.0  # for the end of a profile trial whose ranks have been ended


class OpenStudy(OpenRun[StudyRecord, StudyPaths]):
    """A study that runs in this process."""

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
        self.driver.advice.foresee(self.driver.place.starter_here)
        self.driver.prime()

    def profiled(self) -> None:
        """Writes the metric that the study goes by, and checks the switches. The profile trial may have replaced it."""
        self.driver.advice.tell_plan(has_search=self.driver.search is not None)
        file = self.driver.setup.arguments.config_path
        require_switchable(self.record.switches, self.driver.known.found, file)
        require_sizes(self.driver.known.switches, self.driver.known.layouts, named_in(file))
        if self.record.metric != self.driver.metric:
            self.driver.log.warning("%s", INSTEAD)
            self._update()

    def finish(self, status: StudyStatus, reason: str = "") -> None:
        """Writes how the study ended. If the disk is full, the record stays as it was, and the study can be resumed."""
        answer = answer_of(self.driver)
        if status is StudyStatus.COMPLETED:
            with contextlib.suppress(FolderError), folder_error_told(self.paths.root):
                self.driver.advice.learn_speed(self.driver.state, self.driver.known.base_config)
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
    return open_planned(plan_study(arguments, tell), work_dir, flow_run_id)


@dataclass(frozen=True)
class PlannedStudy:
    """A study that can begin. Nothing of it has been started or written."""

    arguments: StudyArguments
    experiment: Experiment
    host: Host
    fingerprint: Fingerprint
    plan: tuple[PlanPaths, PlanRecord] | None = None


def plan_study(
    arguments: StudyArguments,
    tell: Callable[[str], None] = lambda sentence: None,
    check: Callable[[], None] = lambda: None,
) -> PlannedStudy:
    """Checks the arguments of a new study. Raises InputError if they, the experiment or this host do not fit.

    `check` is called repeatedly when something takes long. Its error ends the waiting.
    """
    found = Followed(arguments.command, arguments.model_dir)
    if arguments.command:
        found = followed(arguments.command, arguments.model_dir, tell, check, arguments.arg_mappings.values())
        arguments = arguments.model_copy(update={"command": found.words, "model_dir": found.folder})
    experiment = _read_experiment(arguments, this_host(), found.wrapper)
    experiment = replace(experiment, notes=(*found.notes, *experiment.notes))
    host = slots_for(experiment, arguments.ray_address, arguments.run_full_experiment)
    check_arguments(arguments, experiment, host)
    experiment = replace(experiment, notes=(*experiment.notes, *host.notes))
    words = (*found.wrapper, *arguments.command)
    keep_secret(KnownSecrets.of_experiment(experiment) + KnownSecrets.within({"command": words}))
    slots, given = experiment.config.resources.slots_per_trial, arguments.plan
    stages = arguments.zero_stages
    plan = None if given is None else read_given_plan(given, host, slots, experiment.ds_config, stages)
    return PlannedStudy(arguments, experiment, host, fingerprint_of(experiment, arguments, host), plan)


def open_planned(planned: PlannedStudy, work_dir: Path, flow_run_id: str | None = None) -> OpenStudy:
    """Opens a planned study. The other arguments are those of `new_study`."""
    arguments, experiment, host, fingerprint = planned.arguments, planned.experiment, planned.host, planned.fingerprint
    study_id = new_id(known_here().hide(experiment.name))
    paths = StudyPaths((work_dir / STUDIES / study_id).absolute())
    tracking_uri = default_tracking_uri(work_dir)
    new_folder(paths.trials, "study", experiment, paths.experiment)
    with folder_error_told(paths.root):
        write_whole(paths.fingerprint, fingerprint.model_dump_json(indent=2))
        write_wrapper(paths, experiment.entrypoint.wrapper)
        if arguments.from_earlier:
            keep_earlier_studies(paths.root.parent, experiment.name, arguments, paths)
        if planned.plan is not None:
            files, plan = planned.plan
            speeds = device_speeds(paths.root.parent) if arguments.from_earlier else {}
            keep_plan(files, plan, paths.plan, speeds.get(plan.devices[0].device))
    known = KnownProgram.of(experiment, environment_of(experiment, arguments.include, host.device))
    record = StudyRecord(
        study_id=study_id,
        name=experiment.name,
        method=arguments.method,
        metric=arguments.metric,
        arguments=json.loads(arguments.model_copy(update=_absolute(arguments)).model_dump_json()),
        model_dir=str(experiment.model_dir),
        ds_config=experiment.ds_config,
        switches=known.switches,
        layouts=dict(known.layouts),
        started_at=time.time(),
        flow_run_id=flow_run_id,
    )
    study = _open(record, arguments, experiment, host, paths, tracking_uri, is_new=True)
    if fingerprint.is_cut_off:
        study.driver.log.warning("There is more code than a study hashes, so some changes will not be noticed.")
    return study


def _read_experiment(arguments: StudyArguments, host: Host, wrapper: Sequence[str]) -> Experiment:
    if arguments.config_path is not None:
        return read_experiment(arguments.config_path, arguments.model_dir, include=arguments.include)
    mappings, include, vary = arguments.arg_mappings, arguments.include, arguments.vary
    return read_command(arguments.command, mappings, arguments.model_dir, host, include, vary, wrapper)


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
    keep_secret(KnownSecrets.of_study(paths))
    wrapper = read_wrapper(paths)
    experiment = read_experiment(paths.experiment, arguments.model_dir, include=arguments.include, wrapper=wrapper)
    if experiment.ds_config != record.ds_config:
        raise InputError(
            "the DeepSpeed configuration has changed since the study began.",
            where=str(experiment.model_dir),
            remedy="Put it back, or start a new study.",
        )
    host = slots_for(experiment, arguments.ray_address, arguments.run_full_experiment)
    check_arguments(arguments, experiment, host)
    is_over = record.status is StudyStatus.COMPLETED
    changed = "" if is_over else _changes(fingerprint_in(paths), fingerprint_of(experiment, arguments, host))
    experiment = replace(experiment, notes=(*experiment.notes, *host.notes, *filter(None, [changed])))
    tracking_uri = default_tracking_uri(work_dir_of(paths.root))
    study = _open(record, arguments, experiment, host, paths, tracking_uri)
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


def check_arguments(arguments: StudyArguments, experiment: Experiment, host: Host) -> None:
    """Raises InputError if the arguments do not fit this host or each other."""
    slots = experiment.config.resources.slots_per_trial
    check_slots(experiment, host)
    if arguments.max_slots is not None and not slots <= arguments.max_slots <= len(host.slots):
        raise InputError(
            f"{arguments.max_slots} is not between one trial's slots ({slots}) and this host's ({len(host.slots)}).",
            where="--max-slots",
            remedy="Leave it out to use the whole host.",
        )
    if arguments.max_trials < 2:
        raise InputError(
            f"{arguments.max_trials} trial leaves none for the search: the profile trial counts.",
            where="--max-trials",
            remedy="Allow at least 2.",
        )
    check_include(arguments.include)
    if arguments.run_full_experiment:
        check_length(experiment)


def _absolute(arguments: StudyArguments) -> dict[str, object]:
    return {
        "config_path": None if arguments.config_path is None else arguments.config_path.absolute(),
        "model_dir": arguments.model_dir.absolute(),
        "include": tuple(path.absolute() for path in arguments.include),
        "plan": None if arguments.plan is None else arguments.plan.absolute(),
    }


def _open(
    record: StudyRecord,
    arguments: StudyArguments,
    experiment: Experiment,
    host: Host,
    paths: StudyPaths,
    tracking_uri: str,
    is_new: bool = False,
) -> OpenStudy:
    # From here on `resume` finds the study, however this process ends.
    with folder_error_told(paths.root):
        held = hold_folder(paths, record, tracking_uri)
    study_id, log = held.record.id, held.log
    over_hosts = arguments.ray_address is not None or bool(experiment.config.resources.hosts)
    first = tuple(filter(None, (uncovered(experiment.model_dir, paths.root, over_hosts), held.copied)))
    for text in first:
        log.warning("%s", text)
    experiment = replace(experiment, notes=(*first, *experiment.notes))
    place: Place
    starter = None
    if arguments.ray_address is None:
        starter = starter_of(experiment, arguments, host, str(paths.fork_server_log), log.info)
        place = ThisHost(starter, host, host_lock_dir(), is_one=not experiment.config.resources.hosts)
    else:
        place = cluster_of(experiment, arguments, host, study_id, log.info)
    setup = StudySetup.now(study_id, time.time(), experiment, arguments, paths, host)
    driver = StudyDriver(setup, place, log)
    # A study with only its training left has its answer.
    asked = None if record.status is StudyStatus.COMPLETED else starter
    check = ConfigCheck(experiment, asked, log)
    return OpenStudy(held, paths, driver, check, is_new)


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
