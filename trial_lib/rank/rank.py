"""One rank of a trial: prepares the process, installs the probe, and runs the user's program."""

import atexit
import contextlib
import json
import os
import threading
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.measurement import Measurement
from zerotune.trial_lib.messages.orders import NextSize, RankOrder, TrainingOrder, exact_record, now
from zerotune.trial_lib.messages.turned import settings_of
from zerotune.trial_lib.rank import device
from zerotune.trial_lib.rank.endings import EndedEarlyError
from zerotune.trial_lib.rank.records import RankRecords, end_now, fail
from zerotune.trial_lib.rank.redirects import note_builds, swap_into_own_folder
from zerotune.trial_lib.rank.user_program import run_program, say, without_own_frames


def run(payload: Mapping[str, Any], rank: int) -> None:
    """Runs a rank of a trial, or of a sweep, by a `RankOrder` as JSON. It ends the process and does not return."""
    order = RankOrder.from_json(payload)
    process = os.getpid()
    session: Any = None
    records = RankRecords(order, rank)
    # Later sizes find the ops loaded, so the first folder has all builds.
    note_builds(Path(order.scratch))
    swap_into_own_folder(Path(order.scratch))
    try:
        # The import is inside, because a rank of a broken environment has to leave a record too.
        from zerotune.trial_lib.rank.session import SweepSession

        device.expect(order.device)
        session = SweepSession(order, rank, records)
        session.install()
        if rank == 0 and order.sizes[0].with_profile:
            records.imports.follow()
        while _run_program(order, session, process):
            session.start_over()
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        if os.getpid() == process and session is None:
            records.fail(error, order.sizes[0], {})
        elif os.getpid() == process:
            session.fail(error)
        _end_child(error)
    _end_child(None)


def _run_program(order: RankOrder, session: Any, process: int) -> bool:
    # Runs the program once; returns whether it has to run again, with the next size.
    try:
        try:
            run_program(order.program, _arguments(order, session.size.arguments))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        if os.getpid() == process and not session.is_between:
            main = threading.main_thread()
            has_trained_here = session.probe.steps_seen > 0 and session.probe.thread is main
            if not has_trained_here and any(not each.daemon for each in threading.enumerate() if each is not main):
                # The interpreter does the same at its end, because the training may run in a thread. No executor works
                # afterwards.
                session.is_last_run = True
                threading._shutdown()  # type: ignore[attr-defined]
            session.early_finish.by_itself()
    except BaseException as error:
        if os.getpid() == process and not session.is_between and not isinstance(error, EndedEarlyError):
            with contextlib.suppress(NextSize):
                session.early_finish.after(error)
        # The size is measured, so the way in which the program has ended does not matter.
        if os.getpid() != process or not session.is_between:
            raise
    return os.getpid() == process


def _end_child(error: BaseException | None) -> None:
    # Ends a child that the program has forked, as Python would. A child is not the rank, and leaves no record.
    code = 0 if error is None else 1
    if error is not None:
        say(without_own_frames(error))
        if isinstance(error, SystemExit) and isinstance(error.code, int):
            code = error.code
    with contextlib.suppress(BaseException):
        atexit._run_exitfuncs()
    end_now(code)


def train(payload: Mapping[str, Any], rank: int) -> None:
    """Runs a rank of a full experiment, to the program's own end, by a `TrainingOrder` as JSON. It does not return."""
    order = exact_record(TrainingOrder, payload)
    try:
        from zerotune.trial_lib.rank import huggingface, interception, patching, torch_functions

        device.expect(order.device)
        huggingface.adopt(order.ds_config, order.is_in_code)
        interception.adopt_zero_init(order.ds_config, order.is_in_code)
        torch_functions.install_loaders(lambda: settings_of("loader", order.turned))
        torch_functions.install_fused_adam(lambda: settings_of("optimizer", order.turned))
        if order.is_in_code:
            interception.adopt(order.ds_config, order.turned)
        else:
            patching.when_imported("deepspeed", lambda deepspeed: interception.let_config_count(order.turned))
        try:
            run_program(order.program, _arguments(order, order.arguments))
        except SystemExit as stop:
            if stop.code not in (None, 0):
                raise
        # The interpreter does the same at its end, because a thread may still write a checkpoint.
        threading._shutdown()  # type: ignore[attr-defined]
        write_whole(Path(order.finished[rank]), json.dumps(asdict(Measurement(outcome="completed", time=now()))))
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        fail(Path(order.failures[rank]), {}, error, engine_built=True)
    # The exit functions run, and the interpreter's own end does not. gloo's threads may still hold tensors of the last
    # step, and sometimes abort there. With another status than 0, the guard would end ranks that still save.
    try:
        atexit._run_exitfuncs()
    except BaseException:  # noqa: BLE001 - the program has returned: the training has ended well
        traceback.print_exc()
    end_now(0)


def _arguments(order: RankOrder | TrainingOrder, arguments: list[str]) -> list[str]:
    option = order.local_rank_option
    return [f"{option}={os.environ['LOCAL_RANK']}", *arguments] if option else arguments
