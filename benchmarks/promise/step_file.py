"""Stands in for the programs' `stopwatch`: writes down each optimizer step as it ends, for who watches from outside."""

import os
import time
from pathlib import Path


class Stopwatch:
    """Appends the processor time of each step a sample, in seconds, to a file of this rank's in STEPS_FOLDER.

    Not in the working folder: what a trial writes there, nobody else sees.
    """

    def __init__(self) -> None:
        self._file = Path(os.environ["STEPS_FOLDER"], f"steps-{os.getpid()}")
        self._file.touch()
        self._last = time.process_time()

    def step(self, samples: int) -> None:
        """Notes the end of an optimizer step that took so many samples of this rank."""
        seconds = (time.process_time() - self._last) / samples
        with self._file.open("a", encoding="utf-8") as file:
            file.write(f"{seconds}\n")
        self._last = time.process_time()

    def report(self) -> None:
        """Has nothing left to say."""
