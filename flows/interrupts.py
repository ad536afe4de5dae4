"""Ctrl-C and SIGTERM: the first one ends a command in good order, another one at once."""

import atexit
import contextlib
import logging
import os
import signal
import sys
from typing import NoReturn

EXIT_CODE = 130

_SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupts:
    """Hears the signals of one command, in its main thread.

    Attributes:
        resume_command: what to type to go on, once there is something to go on with.
        prefect_is_away: whether the server has not heard all: Prefect would try for minutes, as the process ends, to
            tell it.
    """

    def __init__(self) -> None:
        self.resume_command: str | None = None
        self.prefect_is_away = False
        self._heard = False
        self._exit_code: int | None = None

    def listen(self) -> None:
        """Starts listening: the first signal raises KeyboardInterrupt, another one ends the process at once.

        To be called before whatever registers to be called at exit, as Prefect does: what is first there comes last.
        """
        for signal_number in _SIGNALS:
            signal.signal(signal_number, self._hear)
        atexit.register(self._leave)

    def hear_again(self) -> None:
        """Raises what was heard and did not arrive; to be called where nothing that was interrupted goes on.

        Python drops a KeyboardInterrupt that a signal raises within a finalizer, or where an import gives its lock
        back: one in a hundred of those that come while Prefect is imported.

        Raises:
            KeyboardInterrupt: a signal has been heard.
        """
        if self._heard:
            raise KeyboardInterrupt

    def end(self, exit_code: int) -> NoReturn:
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
        """What a person is told: nothing was started, or how to go on."""
        if self.resume_command is None:
            return "zerotune: interrupted before anything was started."
        return f"Interrupted. Go on with: {self.resume_command}"

    def _hear(self, _signal: int, _frame: object) -> NoReturn:
        if self._heard:
            # Whatever was started ends with this process, and the history is whole after each of its lines.
            os.write(2, f"\n{self.message}\n".encode())
            os._exit(EXIT_CODE)
        self._heard = True
        raise KeyboardInterrupt


interrupts = Interrupts()
"""Of this process."""
