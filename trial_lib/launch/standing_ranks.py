"""A word while ranks stand still: what they wait for, where one of them is at work that takes long."""

import contextlib
import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_POLL_S = 2.0
# As `trial_lib.measure.ends.endings` names the end of a rank.
_ENDED, _WORKS = "ended", "works"
# To the next word of a trial, and how many times as long it is to the one after that.
_AGAIN_S, _LONGER = 120.0, 2.0


@contextlib.contextmanager
def told_of(label: str, states: list[Path], note: Callable[[str], None]) -> Iterator[None]:
    """Tells what the ranks of a trial say that they do, for as long as the trial runs.

    Args:
        label: names the trial.
        states: the ranks' files, by rank; each is there only while its rank stands still.
        note: is told.
    """
    over = threading.Event()
    thread = threading.Thread(target=_tell, args=(label, states, note, over), daemon=True, name="standing-ranks")
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


def _tell(label: str, states: list[Path], note: Callable[[str], None], over: threading.Event) -> None:
    next_at, pause_s = 0.0, _AGAIN_S
    while not over.wait(_POLL_S):
        if time.monotonic() < next_at:
            continue
        said = [state for state in map(_read, states) if state is not None]
        # Ranks that have all ended wait for nothing: their processes are about to go.
        kinds = {state["end"]["kind"] for state in said}
        if len(said) == len(states) and kinds != {_ENDED}:
            words = "; ".join(f"rank {rank} {state['words']}" for rank, state in enumerate(said))
            note(f"{label} {'takes long' if kinds == {_WORKS} else 'stands still'}: {words}")
            next_at, pause_s = time.monotonic() + pause_s, pause_s * _LONGER


def _read(path: Path) -> dict[str, Any] | None:
    with contextlib.suppress(OSError, json.JSONDecodeError):
        state: dict[str, Any] = json.loads(path.read_text())
        return state
    return None
