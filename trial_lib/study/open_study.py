"""Opening a study: its folder, its lock, its launcher and its tracker; and closing all of them, however it ended."""

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path

from filelock import FileLock
from pydantic import ValidationError

from trial_lib.experiment.errors import InputError
from trial_lib.experiment.files import write_whole
from trial_lib.experiment.full_experiment import FullExperimentPaths, FullExperimentRecord
from trial_lib.experiment.study import StudyPaths, StudyRecord, StudyStatus
from trial_lib.experiment.yaml_file import Experiment, read_experiment
from trial_lib.launch.cold import ColdLauncher
from trial_lib.launch.hardware import Host, this_host
from trial_lib.launch.launcher import Launcher
from trial_lib.launch.warm import WarmLauncher
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.confirming import answer_of
from trial_lib.study.driver import StudyDriver
from trial_lib.study.folder import (
    check_include,
    check_length,
    check_slots,
    file_logger,
    hold_lock,
    host_lock_dir,
    new_folder,
    new_id,
)
from trial_lib.study.program import environment_of, interpreter_of
from trial_lib.study.typed_command import devices_of, read_command
from trial_lib.tracking.tracker import StudyTracker
from trial_lib.tracking.tracking_uri import default_tracking_uri

STUDIES = "zerotune-studies"
_TRACKING_CLOSE_S = 30.0
_TRACKING_SHORT_S = 5.0  # where somebody has interrupted the command, or MLflow has been away


class OpenStudy:
    """A study that runs in this process.

    Attributes:
        driver: its trials.
        paths: its files.
        tracker: sends them on.
    """

    def __init__(
        self,
        record: StudyRecord,
        paths: StudyPaths,
        driver: StudyDriver,
        launcher: Launcher,
        tracker: StudyTracker,
        lock: FileLock,
    ) -> None:
        self.driver = driver
        self.paths = paths
        self.tracker = tracker
        self._record = record
        self._launcher = launcher
        self._lock = lock
        self._closed = False

    @property
    def is_closed(self) -> bool:
        """Whether it has been closed."""
        return self._closed

    @property
    def record(self) -> StudyRecord:
        """The study's record as it stands on the disk."""
        return self._record

    def begin(self) -> None:
        """Writes the record of a study that runs (again), starts sending it on, and primes what it knows of."""
        self._update(status=StudyStatus.RUNNING, reason="", ended_at=None)
        self.tracker.start()
        self.driver.prime()

    def finish(self, status: StudyStatus, reason: str = "") -> None:
        """Writes how the study ended."""
        answer = answer_of(self.driver)
        finding = None if answer is None else answer.finding
        self._update(
            status=status,
            reason=reason,
            ended_at=time.time(),
            best_number=None if answer is None else answer.best.number,
            gain=None if answer is None else answer.gain,
            gain_interval=None if answer is None else answer.gain_interval,
            finding="" if finding is None else finding.sentence,
        )

    def close(self) -> bool:
        """Ends the launcher, and waits a while for the tracking server; returns whether that has everything."""
        if self._closed:
            return True
        self._closed = True
        self.driver.cancel()
        self._launcher.close()
        is_hopeless = self._record.status is StudyStatus.CANCELLED or self.tracker.last_error is not None
        try:
            return self.tracker.close(_TRACKING_SHORT_S if is_hopeless else _TRACKING_CLOSE_S)
        finally:
            self._lock.release()

    def _update(self, **changes: object) -> None:
        self._record = self._record.model_copy(update=changes)
        write_whole(self.paths.record, self._record.model_dump_json(indent=2))
        self.tracker.notify()


# A command opens its study before the flow starts, so that the fork server primes while Prefect comes up; the flow then
# finds it here, and the command finds the one that the flow opened last.
_opened: dict[Path, OpenStudy] = {}


def last_opened(study: OpenStudy) -> OpenStudy:
    """Returns the study as this process opened it last: a flow that failed opens it anew, and replays its history."""
    return _opened[study.paths.root]


def new_study(arguments: StudyArguments, work_dir: Path) -> OpenStudy:
    """Checks the arguments and opens a new study; its servers come up in the background.

    Args:
        arguments: the study's.
        work_dir: the folder that studies and the tracking store stand in.

    Raises:
        InputError: the arguments, the experiment or this host do not fit; nothing was started or written.
    """
    host = this_host()
    experiment = _read_experiment(arguments, host)
    host = devices_of(experiment.entrypoint, host)
    check_arguments(arguments, experiment, host)
    study_id = new_id(experiment.name)
    paths = StudyPaths((work_dir / STUDIES / study_id).absolute())
    tracking_uri = default_tracking_uri(work_dir)
    new_folder(paths.trials, "study", experiment, paths.experiment, paths.shown_experiment)
    record = StudyRecord(
        study_id=study_id,
        name=experiment.name,
        method=arguments.method,
        metric=arguments.metric,
        arguments=json.loads(arguments.model_copy(update=_absolute(arguments)).model_dump_json()),
        model_dir=str(experiment.model_dir),
        ds_config=experiment.ds_config,
        started_at=time.time(),
    )
    return _open(record, arguments, experiment, host, paths, tracking_uri)


def _read_experiment(arguments: StudyArguments, host: Host) -> Experiment:
    if arguments.config_path is not None:
        return read_experiment(arguments.config_path, arguments.model_dir, include=arguments.include)
    return read_command(arguments.command, arguments.arg_mappings, arguments.model_dir, host, arguments.include)


def resume_study(root: Path) -> OpenStudy:
    """Opens a study that was interrupted, or whose full experiment has failed; it goes on where it was.

    Args:
        root: the study's folder.

    Raises:
        InputError: there is no study, nothing of it is left to do, another process drives it, or the experiment has
            changed.
    """
    paths = StudyPaths(root.absolute())
    opened = _opened.get(paths.root)
    if opened is not None and not opened.is_closed:
        return opened
    if not paths.record.is_file():
        raise InputError(
            "this is not a study's folder: it has no study.json.",
            where=str(root),
            remedy=f"Name one of the folders in {STUDIES}.",
        )
    try:
        record = StudyRecord.model_validate_json(paths.record.read_text())
        arguments = StudyArguments.model_validate(record.arguments)
    except ValidationError as error:
        raise InputError(
            f"the study's record is damaged or of another version ({error.error_count()} mistakes).",
            where=str(paths.record),
            remedy="Start a new study.",
        ) from None
    if record.status is StudyStatus.COMPLETED:
        if not arguments.run_full_experiment or _has_trained(paths):
            raise InputError(
                "this study has finished.",
                where=str(root),
                remedy=f"Its answer is {paths.best_ds_config.name} there; start a new study to search on.",
            )
        # No trial is left to run: nothing for a fork server to do.
        arguments = arguments.model_copy(update={"launcher": "cold"})
    experiment = read_experiment(paths.experiment, arguments.model_dir, include=arguments.include)
    if experiment.ds_config != record.ds_config:
        raise InputError(
            "the DeepSpeed configuration has changed since the study began.",
            where=str(experiment.model_dir),
            remedy="Put it back, or start a new study.",
        )
    host = devices_of(experiment.entrypoint, this_host())
    check_arguments(arguments, experiment, host)
    tracking_uri = default_tracking_uri(paths.root.parent.parent)
    return _open(record, arguments, experiment, host, paths, tracking_uri)


def _has_trained(paths: StudyPaths) -> bool:
    """Returns whether a study's full experiment has come to its end."""
    record = FullExperimentPaths(paths.full_experiment.root).record
    with contextlib.suppress(FileNotFoundError, ValueError):
        return FullExperimentRecord.model_validate_json(record.read_text()).status is StudyStatus.COMPLETED
    return False


def check_arguments(arguments: StudyArguments, experiment: Experiment, host: Host) -> None:
    """Refuses arguments that cannot work on this host.

    Raises:
        InputError: too few trials, more slots than there are, something to include that does not exist, or a full
            experiment without a length.
    """
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
    }


def _open(
    record: StudyRecord,
    arguments: StudyArguments,
    experiment: Experiment,
    host: Host,
    paths: StudyPaths,
    tracking_uri: str,
) -> OpenStudy:
    lock = hold_lock(paths.lock, "study")
    # From here on `resume` goes on with it, whatever ends this process.
    write_whole(paths.record, record.model_dump_json(indent=2))
    log = file_logger(record.study_id, paths.log)
    launcher = _launcher(arguments, experiment, host, paths, log.info)
    driver = StudyDriver(
        record.study_id, time.time(), experiment, arguments, paths, host, launcher, host_lock_dir(), log
    )
    study = OpenStudy(record, paths, driver, launcher, StudyTracker(paths, tracking_uri), lock)
    _opened[paths.root] = study
    return study


def _launcher(
    arguments: StudyArguments, experiment: Experiment, host: Host, paths: StudyPaths, note: Callable[[str], None]
) -> Launcher:
    interpreter = interpreter_of(experiment)
    environment = environment_of(experiment, arguments.include)
    builders = needed_builders(experiment, may_offload=_may_offload(arguments, experiment, host))
    if arguments.launcher == "cold":
        return ColdLauncher(interpreter, builders, environment, note)
    launcher = WarmLauncher(interpreter, builders, environment, str(paths.fork_server_log), note)
    launcher.start()
    return launcher


def _may_offload(arguments: StudyArguments, experiment: Experiment, host: Host) -> bool:
    """Returns whether the search may offload an optimizer that the user's own configuration does not."""
    named = any("offload" in path for path in experiment.config.search_space)
    return named or (arguments.method == "adaptive" and host.device == "cuda")


def needed_builders(experiment: Experiment, may_offload: bool = False) -> list[str]:
    """Returns the DeepSpeed ops that the experiment's trials will want built, by their builders' names.

    Args:
        experiment: what the user submitted.
        may_offload: whether a trial may offload the optimizer where the configuration does not.
    """
    builders = ["ShareMemCommBuilder"]
    if experiment.config.follow_launcher and not experiment.ds_config:
        # What the code will ask for shows in the profile trial; mostly it is this.
        return [*builders, "FusedAdamBuilder", *(["CPUAdamBuilder"] if may_offload else [])]
    optimizer = experiment.ds_config.get("optimizer") or {}
    if str(optimizer.get("type", "")).lower() in ("adam", "adamw"):
        offloads = (experiment.ds_config.get("zero_optimization") or {}).get("offload_optimizer")
        if not (optimizer.get("params") or {}).get("torch_adam"):
            builders += ["CPUAdamBuilder"] if offloads else ["FusedAdamBuilder"]
            builders += ["CPUAdamBuilder"] if may_offload and not offloads else []
    return builders
