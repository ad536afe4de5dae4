"""The driver of a full experiment: runs the training at full length, and keeps the record, the log and MLflow."""

import contextlib
import dataclasses
import json
import logging
import math
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from zerotune.trial_lib.deepspeed_config.overrides import TRAIN_BATCH
from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.inputs.read_experiment import Experiment
from zerotune.trial_lib.launch.full_training import TrainingEnd, TrainingPlan, run_training
from zerotune.trial_lib.launch.processes import bootstrap
from zerotune.trial_lib.launch.processes.supervisor import RANKS_OF_TRIAL
from zerotune.trial_lib.launch.rank_starter import RankStarter
from zerotune.trial_lib.messages.files import (
    CHECKPOINT,
    NOTE,
    SYSTEM,
    VALIDATION,
    MetricsReader,
    MetricsRecord,
    append,
    drop_torn_tail,
)
from zerotune.trial_lib.messages.folders import StopRequest
from zerotune.trial_lib.messages.orders import TrainingSpec
from zerotune.trial_lib.records.candidate import FrozenRecord
from zerotune.trial_lib.records.folders import FullExperimentPaths, FullExperimentRecord, StudyStatus
from zerotune.trial_lib.study.run import HeldFolder, OpenRun

_PERIOD_S = 10.0
_GUARD = {"zerotune.trial_lib.launch.processes.supervisor", RANKS_OF_TRIAL}


class SystemMonitor:
    """Appends a sample of the host's load every ten seconds, and a last one at the end.

    A sample has `cpu_percent` (of all the host's cores, since the sample before), `memory_used` (bytes of the host) and
    `training_memory` (resident bytes of the training's processes; shared bytes count for each). For each GPU of the
    training it has `gpu0.utilization` (percent of the last moments) and `gpu0.memory_used` (bytes). `batch` returns the
    last batch that the training has reported, which goes into the sample.
    """

    def __init__(
        self, path: Path, batch: Callable[[], int], sampled: Callable[[], None], log: logging.Logger, host: Host
    ) -> None:
        self._path = path
        self._batch = batch
        self._sampled = sampled
        self._log = log
        self._host = host
        self._slots: list[str] = []
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True, name="system-monitor")

    def start(self) -> None:
        self._thread.start()

    def watch(self, slots: list[str]) -> None:
        """Takes the slots of the training, in the order of its ranks."""
        self._slots = slots

    def close(self) -> None:
        """Takes the last sample, and stops."""
        self._done.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        psutil.cpu_percent()  # the first call of a thread has no earlier value to compare with
        is_logged = False
        is_last = False
        while not is_last:
            is_last = self._done.wait(_PERIOD_S)
            try:
                self._sample()
            except Exception as error:  # noqa: BLE001 - nothing that a training has to end for
                if not is_logged:
                    self._log.warning("system metrics are missing: %s: %s", type(error).__name__, error)
                is_logged = True

    def _sample(self) -> None:
        metrics = {
            "cpu_percent": psutil.cpu_percent(),
            "memory_used": float(psutil.virtual_memory().used),
            "training_memory": _training_memory(),
            **self._load(),
        }
        record = {"kind": SYSTEM, "batch": self._batch(), "time": time.time(), "metrics": metrics}
        append(self._path, json.dumps(record))
        self._sampled()

    def _load(self) -> dict[str, float]:
        loads = kind_of(self._host.device).load(self._host, self._slots)
        return {f"gpu{number}.{name}": value for number, load in enumerate(loads) for name, value in load.items()}


def _training_memory() -> float:
    # The resident bytes of the processes below this process's guards.
    total = 0
    for guard in psutil.Process().children():
        with contextlib.suppress(psutil.NoSuchProcess):
            if not _GUARD.issubset(guard.cmdline()):
                continue
            for process in guard.children(recursive=True):
                with contextlib.suppress(psutil.NoSuchProcess):
                    total += process.memory_info().rss
    return float(total)


_SAVE_S = 20.0  # Prefect gives a flow half a minute to end
_CANCEL_S = 35.0  # the guard gives processes that a driver holds half a minute
LONGEST_END_S = _SAVE_S + _CANCEL_S + 15.0  # of an interrupted full experiment


class TrainingArguments(FrozenRecord):
    """The arguments of a full experiment, as the command line, a deployment or a record gives them.

    Attributes:
        config_path: the experiment's YAML.
        model_dir: the model directory.
        ds_config: merge this DeepSpeed configuration, such as a study's `best_ds_config.json`, into that of the
            experiment. Default: none.
        include: add files or folders that the code imports from outside the model directory.
    """

    config_path: Path
    model_dir: Path
    ds_config: Path | None = None
    include: tuple[Path, ...] = ()


class FullExperiment(OpenRun[FullExperimentRecord, FullExperimentPaths]):
    """A full experiment that runs in this process.

    Only the thread that opened it may call its methods, except `interrupt`, after which the waiting thread stops it.
    """

    def __init__(
        self,
        held: HeldFolder[FullExperimentRecord],
        experiment: Experiment,
        plan: TrainingPlan,
        spec: TrainingSpec,
        starter: RankStarter,
        host: Host,
        lock_dir: Path,
    ) -> None:
        super().__init__(held, plan.paths)
        self.experiment = experiment
        self.validation: dict[str, float] = {}  # the metrics of the last one
        self._plan = plan
        self._spec = spec
        self._stop_request = StopRequest(self.paths.stop)
        self._starter = starter
        self._host = host
        self._lock_dir = lock_dir
        self._cancelled = threading.Event()
        self._stop_by = math.inf
        self._ended = threading.Event()
        self._end = TrainingEnd(False, "It was not started.")
        # A daemon thread, so that nothing that it waits for delays the end of this process.
        self._thread = threading.Thread(target=self._train, daemon=True, name="training")
        self._reader = MetricsReader(self.paths.metrics)
        self._batch = 0
        self._epoch = 0
        self._best: MetricsRecord | None = None
        self._take_in(self._reader.read())
        self._monitor = SystemMonitor(
            self.paths.system_metrics, lambda: self._batch, self.tracker.notify, self.log, host
        )

    @property
    def percent(self) -> float | None:
        """The trained part of its length, in percent; None if the length or the progress is unknown."""
        length = self.experiment.config.searcher.max_length
        if length is None or not self.paths.metrics.exists():
            return None
        samples = self.record.ds_config.get(TRAIN_BATCH)
        if length.batches:
            done = self._batch / length.batches
        elif length.epochs:
            done = self._epoch / length.epochs
        elif length.records and isinstance(samples, int):
            done = self._batch * samples / length.records
        else:
            return None
        return 100.0 * min(1.0, done)

    # -- running -------------------------------------------------------------------------------------------------

    @property
    def has_begun(self) -> bool:
        return self._thread.ident is not None

    def begin(self) -> None:
        super().begin()
        self._monitor.start()
        self._thread.start()

    def wait(self, timeout_s: float) -> TrainingEnd | None:
        """Waits for the training's end, which goes into the record, and handles its reports meanwhile.

        None if it still runs after the time-out. Raises KeyboardInterrupt if it was interrupted.
        """
        has_ended = self._ended.wait(timeout_s)
        if self._interrupted and not self._cancelled.is_set() and not has_ended:
            raise KeyboardInterrupt
        records = self._reader.read()
        for record in records:
            # A person should act on a note.
            self.log.log(logging.WARNING if record.kind == NOTE else logging.INFO, "%s", record)
        if records:
            self._take_in(records)
            self.tracker.notify()
        if not has_ended:
            return None
        if self._end.completed:
            self.finish(StudyStatus.COMPLETED)
        elif not self._cancelled.is_set():
            self.finish(StudyStatus.FAILED, self._end.reason)
        return self._end

    def stop(self) -> None:
        """Ends the training, and returns when its processes are gone.

        Code that checks for a request to stop (`should_preempt`) has some seconds to save a checkpoint first.

        Some processes cannot be killed, for example if a device's driver blocks them. This waits for them as long as
        their guard does, and no longer, however often it is called. The log then says so. The folder stays locked until
        they are gone, or this process is.
        """
        if not self._cancelled.is_set():
            self._ask_to_save()
            self._stop_by = time.monotonic() + _CANCEL_S
            self._cancelled.set()
        if self._thread.is_alive():
            self._thread.join(max(0.0, self._stop_by - time.monotonic()))
        if self._ended.is_set():
            self.wait(0.0)
        elif self._thread.is_alive():
            self.log.warning("processes of the training still run, and do not end")

    def _ask_to_save(self) -> None:
        # Asks the training to save and stop, and waits until it has, up to a time limit.
        if self._thread.is_alive() and self._stop_request.is_heeded:
            self._stop_request.make()
            self.log.warning("asked the training to save a checkpoint and stop within %.0f s", _SAVE_S)
            self._ended.wait(_SAVE_S)

    def finish(self, status: StudyStatus, reason: str = "") -> None:
        """Writes how it ended, unless the record already has an end."""
        status_now = self.record.status
        if status_now is not StudyStatus.RUNNING and not (self._interrupted and status_now is StudyStatus.CANCELLED):
            return
        answer = self._answer() if status is StudyStatus.COMPLETED else {}
        best = self._best
        self._update(
            status=status,
            reason=reason,
            ended_at=time.time(),
            batches=answer.get("batches", self._batch or None),
            best_checkpoint=answer.get("best_checkpoint", best and best.name),
            best_metric=answer.get("best_metric", best and best.metric),
        )
        if answer:
            self.validation = answer.get("metrics") or self.validation

    def close(self) -> bool:
        """Ends the processes, and waits a while for the tracking server; returns whether that has everything."""
        if self._closed:
            return True
        self._closed = True
        try:
            self.stop()
            self._monitor.close()
            self._starter.close()
            return self._close_tracker()
        finally:
            if self._ended.is_set() or not self._thread.is_alive():
                self._lock.release()
            self.is_down = True

    def _train(self) -> None:
        # Runs the training, in a thread of its own.
        try:
            self._end = run_training(
                self._plan,
                self._starter,
                self._host,
                self._lock_dir,
                self._cancelled,
                self.log.warning,
                self._attempt,
            )
            if self._end.completed and self._stop_request.was_followed:
                self._end = TrainingEnd(False, "It saved a checkpoint and stopped, as requested.")
        except Exception as error:
            # For example a full disk.
            self._end = TrainingEnd(False, f"The training could not be run: {type(error).__name__}: {error}")
            self.log.exception("the training could not be run")
        finally:
            self._ended.set()
            if self._closed:
                self._lock.release()

    def _attempt(self, slots: list[str]) -> None:
        # Prepares an attempt, before its ranks start.
        drop_torn_tail(self.paths.metrics)
        self._stop_request.clear()
        shutil.rmtree(self.paths.scratch, ignore_errors=True)
        dataclasses.replace(self._spec, latest_checkpoint=self._latest_checkpoint()).write(self.paths.training_spec)
        self._monitor.watch(slots)
        self._update(attempts=self.record.attempts + 1)

    def _latest_checkpoint(self) -> str | None:
        # The checkpoint that a script resumes from; the loop of a trial class looks for itself.
        if self._spec.trial is not None or not self.paths.checkpoints.exists():
            return None
        # In the program's interpreter: torch reads checkpoints, and ZeroTune's own may have none.
        program = self._plan.program
        module, folder = "zerotune.trial_lib.training.checkpoints", str(self.paths.checkpoints)
        asked = subprocess.run(
            bootstrap.command(program.interpreter, module, folder),
            env=program.environment,
            text=True,
            capture_output=True,
            check=False,
            start_new_session=True,  # Ctrl-C is for this process
        )
        if asked.returncode:
            words = asked.stderr.strip().splitlines() or [f"it ended with {asked.returncode}"]
            raise RuntimeError(f"the newest checkpoint in {folder} could not be found out: {words[-1]}")
        *damaged, newest = asked.stdout.splitlines()
        for note in damaged:
            self.log.warning(note)
        return newest or None

    # -- what is known -------------------------------------------------------------------------------------------

    def _take_in(self, records: list[MetricsRecord]) -> None:
        smaller = self.experiment.config.searcher.smaller_is_better
        for record in records:
            self._batch = max(self._batch, record.batch)
            self._epoch = max(self._epoch, record.epoch or 0)
            if record.kind == VALIDATION:
                self.validation = record.metrics
            if record.kind != CHECKPOINT or record.metric is None or math.isnan(record.metric):
                continue
            best = math.inf if smaller else -math.inf
            if self._best is not None and self._best.metric is not None:
                best = self._best.metric
            if record.metric < best if smaller else record.metric > best:
                self._best = record

    def _answer(self) -> dict[str, Any]:
        # A trial class's record of its end; nothing for a plain script.
        with contextlib.suppress(OSError, ValueError):
            answer: dict[str, Any] = json.loads(self.paths.finished.read_text())
            return answer
        return {}
