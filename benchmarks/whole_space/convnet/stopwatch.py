"""Times the steps of a training, and prints what a sample took."""

import os
import time
from statistics import median

WARM = 5  # steps that start everything


class Stopwatch:
    def __init__(self) -> None:
        self.steps = 0
        self._times: list[tuple[float, float]] = []
        self._last = (time.monotonic(), time.process_time())

    def step(self, samples: int) -> None:
        now = (time.monotonic(), time.process_time())
        if self.steps >= WARM:
            self._times.append(tuple((end - start) / samples for start, end in zip(self._last, now, strict=True)))
        self.steps += 1
        self._last = now

    def report(self) -> None:
        if self._times:
            wall, processor = (median(each) for each in zip(*self._times, strict=True))
            print(f"rank {os.environ['RANK']}: {wall:.6f} s a sample, {processor:.6f} s of processor time", flush=True)
