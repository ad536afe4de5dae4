"""How often Python's threads take turns, in a process that drives trials."""

import sys

_TURN_S = 0.0005


def switch_threads_often() -> None:
    """Gives each thread shorter turns than Python's 5 ms, in the whole process.

    While trials run, other threads import MLflow, Optuna and the report. After each system call, the thread that runs a
    trial may wait for the end of such a turn, and the devices wait with it.
    """
    sys.setswitchinterval(_TURN_S)
