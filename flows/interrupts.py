"""Ctrl-C, SIGTERM and a closed terminal: heard from a command's first moment on, and never in the middle of something.

    main thread         hears signals, and from `run` on does nothing else
    command's thread    works, and asks by `check`, where it can end, whether it is to

A KeyboardInterrupt that a handler raises comes wherever Python is: an import passes it on as another error or drops it,
and so do validators and finalizers. So no handler here raises. As long as there is nothing to end, the first signal
ends the process at once. From then on the records are told at once (`noting`), and the command ends in good order, or
without it where that takes too long or another signal comes.

The command line imports this module before all else: it takes a millisecond.
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
    """Hears the signals of one command.

    Attributes:
        resume_command: what to type to go on, once there is something to go on with.
        answer_command: what to type to see the answer, once there is one.
        leavings: folders outside the study's that go with the command.
        is_heeded: whether a signal is how the command is meant to end: its exit code stands then.
        prefect_is_away: whether the server has not heard all: Prefect would try for minutes, as the process ends, to
            tell it.
    """

    def __init__(self) -> None:
        self.resume_command: str | None = None
        self.answer_command: str | None = None
        self.leavings: list[Path] = []
        self.prefect_is_away = False
        self._signals = 0
        self._is_open = False  # there is something to end
        self._is_opening = False
        self._is_over = False  # the command has ended
        self.is_heeded = False
        self._is_told = False
        self._notes: list[Callable[[], None]] = []
        self._patience_s = _PATIENCE_S
        self._exit_code: int | None = None

    def __reduce__(self) -> str:
        """Returns its name, by which each process has its own: Prefect sends flows, and what they name, to Ray."""
        return "interrupts"

    def listen(self) -> None:
        """Starts listening, in the main thread.

        To be called before whatever registers to be called at exit, as Prefect does: what is first there comes last.
        """
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._hear)
        # Under nohup it is ignored, and the command stays when its terminal goes.
        if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
            signal.signal(signal.SIGHUP, self._hear)
        atexit.register(self._leave)

    @property
    def heard(self) -> bool:
        """Whether a signal has been heard: what goes wrong from then on comes of it."""
        return self._signals > 0

    def check(self) -> None:
        """Ends what runs where a signal has been heard; to be called where the command can end, and while it waits.

        Raises:
            KeyboardInterrupt: one has.
        """
        if self.heard:
            raise KeyboardInterrupt

    def run(self, command: "Callable[[], int]") -> int:
        """Runs a command in a thread of its own, while this one hears signals; returns the exit code.

        Raises:
            BaseException: what the command raises, unless a signal has ended it.
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
        """Returns what work returns that takes seconds and asks nobody whether it is to end, such as an import.

        Raises:
            KeyboardInterrupt: a signal has been heard; the work goes on, and what it comes to is lost.
        """
        working = Aside(work)
        while working.goes_on:
            self.check()
            working.wait()
        result: Result = working.result()
        return result

    def _wind_up(self, working: "Aside") -> None:
        """Has what was heard noted and waits for the command's end; ends the process where that does not come."""
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
                # Whatever was started ends with this process, and the history is whole after each of its lines.
                self._remove_leavings()
                self._leave_at_once()
            working.wait()

    def _remove_leavings(self) -> None:
        import shutil
        import time

        # Ranks that are being killed may write until they are gone.
        tried_until = time.monotonic() + _REMOVAL_S
        while (left := [folder for folder in self.leavings if folder.exists()]) and time.monotonic() < tried_until:
            for folder in left:
                shutil.rmtree(folder, ignore_errors=True)

    @contextlib.contextmanager
    def opening(self) -> "Iterator[None]":
        """While its body makes what is to be ended from then on, a signal waits for it to be whole.

        Raises:
            KeyboardInterrupt: a signal was heard before.
        """
        # In this order: a signal that comes meanwhile finds it open, or is found.
        self._is_open = self._is_opening = True
        self.check()
        try:
            yield
        finally:
            self._is_opening = False

    @contextlib.contextmanager
    def noting(self, note: "Callable[[], None]", patience_s: float = _PATIENCE_S) -> "Iterator[None]":
        """While its body runs, the first signal calls `note`, in the main thread; one that came before does, too.

        Args:
            note: says in a record that it was interrupted, and begins to end what runs; returns at once.
            patience_s: seconds that the end in good order may take.

        Raises:
            KeyboardInterrupt: a signal was heard before.
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
        """Ends the process, once everything that was to be said and written has been."""
        if self.prefect_is_away:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(exit_code)
        self._exit_code = exit_code
        sys.exit(exit_code)

    def _leave(self) -> None:
        """Ends the process when all threads and all else has: to take the interpreter apart needs a second and more."""
        if self._exit_code is None:
            return
        import logging

        try:
            logging.shutdown()
            for stream in (sys.stdout, sys.stderr):
                # One that was closed before the command began is None; nobody reads what does not arrive.
                with contextlib.suppress(OSError, ValueError, AttributeError):
                    stream.flush()
        finally:
            os._exit(self._exit_code)

    @property
    def message(self) -> str:
        """What a person is told: nothing was started, how to go on, or where the answer is."""
        if self.answer_command is not None:
            return f"Interrupted, when the study had completed. Its answer: {self.answer_command}"
        if self.resume_command is not None:
            return f"Interrupted. Go on with: {self.resume_command}"
        when = "at its end, with everything done" if self._is_over else "before anything was started"
        return f"zerotune: interrupted {when}."

    def tell(self) -> None:
        """Tells a person, once, on standard error."""
        if self._is_told:
            return
        self._is_told = True
        # A live table hides it.
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
        finally:
            os._exit(EXIT_CODE)


class Aside:
    """Work that goes on in a thread of its own."""

    def __init__(self, work: "Callable[[], Any]") -> None:
        # What takes time is imported when signals are heard.
        import threading

        self._work = work
        self._ends: list[Any] = []
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True, name="command")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._ends.append(self._work())
        except BaseException as error:  # noqa: BLE001 - raised where the result is asked for
            self._error = error

    @property
    def goes_on(self) -> bool:
        """Whether it has not ended."""
        return self._thread.is_alive()

    def wait(self) -> None:
        """Waits a moment for its end."""
        self._thread.join(_POLL_S)

    def result(self) -> "Any":
        """Returns what it returned, or raises what it raised."""
        if self._error is not None:
            raise self._error
        return self._ends[0]


interrupts = Interrupts()
"""Of this process."""
