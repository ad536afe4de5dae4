"""The rank of a foreseen run: runs the user's program under fake tensors, and writes the record."""

import contextlib
import json
import os
import sys
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from zerotune.trial_lib.messages.files import write_whole
from zerotune.trial_lib.messages.folders import read_layer
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun, ForeseeOrder
from zerotune.trial_lib.messages.orders import exact_record
from zerotune.trial_lib.plan.simulate.logs import line_of, sentence_of
from zerotune.trial_lib.rank.redirects import NotedMemory, swap_into_own_folder
from zerotune.trial_lib.rank.user_program import run_program, say, without_own_frames

_exit_now = os._exit


def run(payload: Mapping[str, Any], rank: int) -> None:
    """Runs rank 0 of a pretended world by a `ForeseeOrder`, as JSON. It ends the process and does not return."""
    order = exact_record(ForeseeOrder, payload)
    process = os.getpid()
    layer = read_layer(Path(order.scratch))
    memory = NotedMemory(Path(order.scratch))
    swap_into_own_folder(Path(order.scratch), instead=Path(order.scratch))
    simulation: Any = None

    def end(stopped: str) -> NoReturn:
        if os.getpid() == process:
            run = ForeseenRun(world=order.world, stopped=stopped) if simulation is None else simulation.record(stopped)
            text = json.dumps(run.to_json(), default=str)
            write_whole(Path(order.result), text if layer is None else layer.as_recorded(text))
            # The guard removes what the program has left in shared memory.
            memory.note_held()
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(BaseException):
                stream.flush()
        _exit_now(0)

    def gives_up() -> None:
        frame = sys._current_frames().get(main)
        place = line_of(traceback.walk_stack(frame))
        end(f"The program made no {order.steps} optimizer steps within {order.patience_s:g} s{place}.")

    main = threading.get_ident()
    watchdog = threading.Timer(order.patience_s, gives_up)
    watchdog.daemon = True
    watchdog.start()
    try:
        # The import is inside, because a broken environment has to leave a record too.
        from zerotune.trial_lib.plan.simulate.engine import Simulation

        simulation = Simulation(order, end)
        simulation.install()
        arguments = [*([f"{order.local_rank_option}=0"] if order.local_rank_option else []), *order.arguments]
        run_program(order.program, arguments)
    except SystemExit as stop:
        if stop.code not in (None, 0):
            ended = f"The program ended itself with {stop.code!r} before its first {order.steps} optimizer steps"
            end(f"{ended}; its log is {order.log}.")
    except BaseException as error:  # noqa: BLE001 - whatever ends the user's code is a record, not a loss
        say(without_own_frames(error))
        end(sentence_of(error))
    began = "its last" if simulation.has_engine else "an engine, and so no"
    end(f"The program ended without {began} optimizer step of {order.steps}.")
