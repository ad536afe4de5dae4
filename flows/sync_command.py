"""What `zerotune sync` does: it sends to MLflow what could not be sent while the work ran."""

from pathlib import Path

from flows.terminal import say
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.full_experiment import FullExperimentPaths, FullExperimentRecord
from trial_lib.experiment.study import StudyPaths, work_dir_of
from trial_lib.study.record_file import read_record, read_record_file
from trial_lib.tracking.full_experiment_sync import FullExperimentSync
from trial_lib.tracking.sync import StudySync
from trial_lib.tracking.tracker import Sync
from trial_lib.tracking.tracking_uri import default_tracking_uri, without_password


def sync_command(root: Path) -> int:
    """Sends what MLflow has not of a study, its full experiment included, or of a full experiment of its own.

    Args:
        root: the folder.

    Returns:
        The exit code: 1 where MLflow could not take it in.

    Raises:
        InputError: there is nothing to send, or a record is damaged.
    """
    root = root.absolute()
    tracking_uri = default_tracking_uri(work_dir_of(root))
    shown = without_password(tracking_uri)
    for sync in _syncs(root, tracking_uri):
        try:
            sync.run()
        except InputError:
            raise
        except Exception as error:  # noqa: BLE001 - MLflow's own errors, and those of what it stands on
            reason = str(error).replace(tracking_uri, shown)
            say(f"MLflow ({shown}) could not take it in: {reason}")
            say(f"Nothing is lost. Try again later: zerotune sync {root}")
            return 1
    say(f"MLflow ({shown}) has everything of {root.name}.")
    return 0


def _syncs(root: Path, tracking_uri: str) -> list[Sync]:
    """Returns what sends a folder's contents, in order: a full experiment's run hangs on its study's."""
    study, own = StudyPaths(root), FullExperimentPaths(root)
    if study.record.is_file():
        read_record(study)
        full_experiment = FullExperimentPaths(study.full_experiment.root)
        after = [_full_experiment(full_experiment, tracking_uri)] if full_experiment.record.is_file() else []
        return [StudySync(study, tracking_uri), *after]
    if own.record.is_file():
        return [_full_experiment(own, tracking_uri)]
    raise InputError(
        "this is neither a study's folder nor a full experiment's.",
        where=str(root),
        remedy="Name one of the folders in zerotune-studies or zerotune-experiments.",
    )


def _full_experiment(paths: FullExperimentPaths, tracking_uri: str) -> Sync:
    read_record_file(paths.record, FullExperimentRecord, "the full experiment's record", "Restore the file.")
    return FullExperimentSync(paths, tracking_uri)
