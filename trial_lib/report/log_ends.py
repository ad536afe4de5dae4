"""The ends of trials' logs: enough for a failed trial, and no more than a page can hold for all together."""

from pathlib import Path

from trial_lib.launch.classify import RankRecord
from trial_lib.launch.rank_records import read_rank_record
from trial_lib.records.result import Outcome, TrialResult
from trial_lib.records.study_folder import StudyPaths, TrialPaths
from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.wire.plain_text import plain

_FAILED, _COMPLETED = (50, 6000), (10, 1200)  # lines, characters
_ALL_CHARACTERS = 1_000_000


class LogEnds:
    """Reads the ends of the logs of one study.

    Args:
        paths: the study's files.
        secrets: values to hide. None hides nothing.
    """

    def __init__(self, paths: StudyPaths, secrets: KnownSecrets | None) -> None:
        self._paths = paths
        self._secrets = secrets
        self._left = _ALL_CHARACTERS

    def of(self, result: TrialResult) -> tuple[str, str]:
        """Returns the end of a trial's log, and the path of the whole log within the study's folder.

        The log is that of the rank that failed first. If its program raised an exception, the traceback comes instead.
        """
        if not result.logs:
            return "", ""
        record = first_failed(result, self._paths)
        log = Path(record.log)
        text = record.log_tail
        if record.failure is not None and not record.failure.get("ended_early"):
            text = str(record.failure.get("traceback") or text)
        # A secret at the cut would lose the part that it is known by.
        text = text if self._secrets is None else self._secrets.hide(text)
        shown = _end(text, *(_COMPLETED if result.outcome is Outcome.COMPLETED else _FAILED))
        if len(shown) > self._left:
            shown = ""
        self._left -= len(shown)
        return shown, str(log.relative_to(self._paths.root)) if log.is_relative_to(self._paths.root) else str(log)


def first_failed(result: TrialResult, paths: StudyPaths) -> RankRecord:
    """Returns the record of the rank that failed first; of rank 0 if none failed, or if an older record lacks it.

    Args:
        result: of a trial that has logs.
        paths: the study's files, wherever its folder is now.
    """
    rank = result.failed_rank or 0
    written, typed = Path(result.logs[rank]), paths.trial(result.number).as_typed.root.name
    # It is another trial's if that has run the same configuration.
    folder = written.parent.parent if written.parent.name == typed else written.parent
    run = TrialPaths(paths.trials / folder.name).run_of(result.logs[rank])
    # In a folder that somebody has sent, a name or a link may lead to any file of this user's.
    logs = [log for log in (run.log(rank), written) if log.resolve().is_relative_to(paths.root.resolve())]
    log, *_ = [*filter(Path.exists, logs), *logs, paths.root]
    return read_rank_record(run.measurement(rank), run.failure(rank), log)


def _end(text: str, lines: int, characters: int) -> str:
    # A progress bar rewrites its line. The last state counts.
    last = [plain(line.rstrip("\r").rpartition("\r")[2]) for line in text.strip().split("\n")[-lines:]]
    return "\n".join(last)[-characters:]
