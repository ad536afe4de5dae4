"""Ctrl-C, SIGTERM and SIGHUP: handled from a command's first moment on, and never in the middle of a step.

    main thread         receives signals, and does nothing else once `run` has begun
    command's thread    works, and calls `check` at points where it can end

A handler that raises KeyboardInterrupt raises it at any line. An import, a validator or a finalizer may drop it or turn
it into another error. So no handler here raises. Before a command has anything to end, the first signal ends the
process at once. Later the first signal is written into the records at once (`noting`), and the command shuts down in
order. If that takes too long, or a second signal arrives, the process ends at once.

The command line imports this module first, so it must import quickly. It takes a millisecond.
"""

import atexit
import contextlib
import os
import signal
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path
    from typing import Any, NoReturn, TypeVar

    Result = TypeVar("Result")

EXIT_CODE = 130

_POLL_S = 0.05
_OPENING_S = 5.0
_PATIENCE_S = 20.0
_REMOVAL_S = 1.0


class Interrupts:
    def __init__(self) -> None:
        self.resume_command: str | None = None  # what to type; None as long as there is nothing to resume
        # What to type to begin anew, because an interrupt leaves nothing of it. None as long as nothing has begun.
        self.again_command: str | None = None
        # Called for the sentence for people if only work after the end is missing. Empty before.
        self.ended: Callable[[], str] = lambda: ""
        self.leavings: list[Path] = []  # folders outside the study's own that are removed when the command ends
        # The Prefect server lacks some records. Prefect would retry them for minutes while the process exits.
        self.prefect_is_away = False
        self._signals = 0
        self._is_open = False  # there is something to end
        self._is_opening = False
        self._is_over = False  # the command has ended
        self.is_heeded = False  # a signal is the normal end of this command: its own exit code is used
        self._is_told = False
        self._notes: list[Callable[[], None]] = []
        self._patience_s = _PATIENCE_S
        self._exit_code: int | None = None

    def __reduce__(self) -> str:
        """Pickles it as its name. Prefect pickles flows for Ray, and each process has its own signals."""
        return "interrupts"

    def listen(self) -> None:
        """Installs the handlers, in the main thread, before anything registers with `atexit`: the first runs last."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        # nohup has it ignored, so that the command survives its terminal.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._hear)
        atexit.register(self._leave)

    @property
    def heard(self) -> bool:
        """Whether a signal has arrived. Errors from then on are its consequence."""
        return self._signals > 0

    def check(self) -> None:
        """Ends the command if a signal has arrived. Call it at points where nothing is half done, and in waiting loops.
        Raises KeyboardInterrupt: a signal has arrived.
        """
        if self.heard:
            raise KeyboardInterrupt

    def run(self, command: "Callable[[], int]") -> int:
        """Runs a command in another thread, while this one receives signals. Returns the exit code.
        Raises BaseException: the command's own error, unless a signal has ended it.
        """
        working = Aside(command)
        while working.goes_on and not self.heard:
            working.wait()
        if working.goes_on:
            self._wind_up(working)
        self._is_over = not self.heard
        self._is_open = False
        if self.heard and not self.is_heeded:
            self.tell()
            return EXIT_CODE
        code: int = working.result()
        return code

    def aside(self, work: "Callable[[], Result]") -> "Result":
        """Returns the result of work that takes seconds and does not call `check`, such as an import.
        Raises KeyboardInterrupt: a signal has arrived. The work continues, and its result is lost.
        """
        working = Aside(work)
        while working.goes_on:
            self.check()
            working.wait()
        result: Result = working.result()
        return result

    def _wind_up(self, working: "Aside") -> None:
        # Notes the signal in the records and waits for the command's end. Ends the process if that does not come.
        import time

        opened_by = time.monotonic() + _OPENING_S
        while self._is_opening and working.goes_on and time.monotonic() < opened_by:
            working.wait()
        noted: list[Callable[[], None]] = []
        heard_at = time.monotonic()
        while working.goes_on:
            for note in [note for note in self._notes if note not in noted]:
                noted.append(note)
                note()
            if self._signals > 1 or time.monotonic() > heard_at + self._patience_s:
                # Everything that was started ends with this process. The history is complete after each of its lines.
                self._leave_at_once()
            working.wait()

    def _remove_leavings(self) -> None:
        import shutil
        import time

        from zerotune.trial_lib.tracking.runs import leavings

        # Ranks may write until the guard has killed them.
        tried_until, all_left = time.monotonic() + _REMOVAL_S, [*self.leavings, *leavings]
        while (left := [folder for folder in all_left if folder.exists()]) and time.monotonic() < tried_until:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def opening(self) -> "Iterator[None]":
        """Delays signals until its body has completed, which creates what a signal has to end from then on."""
        # In this order no signal is missed: its handler sees the flag, or `check` sees the signal.
        self._is_open = self._is_opening = True
        self.check()
        try:
            yield
        finally:
            self._is_opening = False

    @contextlib.contextmanager
    def noting(self, note: "Callable[[], None]", patience_s: float = _PATIENCE_S) -> "Iterator[None]":
        """Has the first signal call `note`, in the main thread, while the body runs.

        It writes into a record that it was interrupted, begins to end the work, and returns at once. It is also called
        for a signal that had arrived before, which then raises KeyboardInterrupt. An orderly end may take `patience_s`.
        """
        before_s, self._patience_s = self._patience_s, patience_s
        self._notes.append(note)
        self.check()
        try:
            yield
        finally:
            self._notes.remove(note)
            self._patience_s = before_s

    def end(self, exit_code: int) -> "NoReturn":
        """Ends the process. All output and all records have been written by now."""
        if self.prefect_is_away:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        self._exit_code = exit_code
        sys.exit(exit_code)

    def _leave(self) -> None:
        # Ends the process after all other exit handlers. Tearing the interpreter down would take a second or more.
        if self._exit_code is None:
            return
        import logging

        try:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                # A stream that was closed before the command began is None.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        finally:
            os._exit(self._exit_code)

    @property
    def message(self) -> str:
        if after := self.ended():
            return after
        if self.resume_command is not None:
            return f"Interrupted. Resume with: {self.resume_command}"
        if self.again_command is not None and not self._is_over:
            return f"Interrupted. Nothing of it is left. Start again with: {self.again_command}"
        when = "after everything was done" if self._is_over else "before anything was started"
        return f"zerotune: interrupted {when}."

    def tell(self) -> None:
        if self._is_told:
            return
        self._is_told = True
        # A live table has hidden the cursor.
        shown_cursor = "\x1b[?25h" if os.isatty(2) else ""
        with contextlib.suppress(OSError):
            os.write(2, f"{shown_cursor}{self.message}\n".encode())

    def _hear(self, _signal: int, _frame: object) -> None:
        self._signals += 1
        if not self._is_open:
            self._leave_at_once()

    def _leave_at_once(self) -> "NoReturn":
        try:
            self.tell()
            self._remove_leavings()
        finally:
            os._exit(EXIT_CODE)


class Aside:
    def __init__(self, work: "Callable[[], Any]") -> None:
        # Imported after the handlers are installed, because it takes time.
        import threading

        self._work = work
        self._ends: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="command")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ends.append(self._work())
        except BaseException as error:  # noqa: BLE001 - `result` raises it
            self._error = error

    @property
    def goes_on(self) -> bool:
        return self._thread.is_alive()

    def wait(self) -> None:
        self._thread.join(_POLL_S)

    def result(self) -> "Any":
        if self._error is not None:
            raise self._error
        return self._ends[0]


interrupts = Interrupts()  # the signals of this process


_TURN_S = 0.0005


def switch_threads_often() -> None:
    """Gives each thread shorter turns than Python's 5 ms, in the whole process.

    While trials run, other threads import MLflow and the report. After each system call, the thread that runs a
    trial may wait for the end of such a turn, and the devices wait with it.
    """
    sys.setswitchinterval(_TURN_S)
