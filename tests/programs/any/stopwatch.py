"""Tells at the end of a training what its optimizer steps cost."""

import os
import statistics
import time

WARM_UP = 3


class Stopwatch:
    """Takes the processor time of each optimizer step of this rank."""

    def __init__(self) -> None:
        self._seconds_per_sample: list[float] = []
        self._last = time.process_time()

    def step(self, samples: int) -> None:
        """Notes the end of an optimizer step that took so many samples of this rank."""
        now = time.process_time()
        self._seconds_per_sample.append((now - self._last) / samples)
        self._last = now

    def report(self) -> None:
        """Prints the median, without the first steps."""
        median = statistics.median(self._seconds_per_sample[WARM_UP:])
        print(f"rank {os.environ.get('RANK', '0')}: {median:.6f} s of processor time a sample", flush=True)
