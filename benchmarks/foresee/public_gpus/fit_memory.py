"""Learns how far off foreseen peaks are, each source left out: `python -m benchmarks.foresee.public_gpus.fit_memory`.

It prints what `trial_lib/plan/fits.py` has, and how many rows of each source the 90 % interval has if its width comes
from the other sources alone. The same for what was measured: which memory, on which device, and what was trained. A
source is a repository, because rows of one table share what is foreseen wrongly.
"""

import argparse
import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from scipy.special import betainc

from benchmarks.foresee.public_gpus import row_bytes
from benchmarks.foresee.public_gpus.model_of_row import GRID_ROWS, ROWS, is_decided, lacks, program_of, read_rows
from benchmarks.foresee.public_gpus.row_bytes import GRID_STORE, STORE, RowBytes
from benchmarks.foresee.public_gpus.row_device import capacity, outside
from zerotune.trial_lib.plan.device_memory import LiveBytes
from zerotune.trial_lib.plan.fits import GIB, INTERVAL, PeakForecast, interval, peak_interval
from zerotune.trial_lib.search.budgets import Uncertain

RESULTS = Path(__file__).parents[2] / "results" / "foreseen_memory_left_out.json"
_KINDS = ("allocated", "reserved", "shown", "unknown")
_TRIES = 12
_FEW = 4


@dataclass(frozen=True)
class Peak:
    """A measured peak with what was foreseen of it.

    Attributes:
        row: the measurement.
        foreseen: the bytes of its program.
        beside: bytes of CUDA and NCCL.
        room: bytes of the device for programs.
    """

    row: Mapping[str, Any]
    foreseen: RowBytes
    beside: Uncertain
    room: float

    @property
    def kind(self) -> str:
        """Which figure of memory it is. One of an unknown kind counts as shown."""
        kind = str(self.row["memory_kind"])
        return "shown" if kind == "unknown" else kind

    @property
    def source(self) -> str:
        """The repository that published it, or the project of its issues."""
        words = re.sub(r"^https://github.com/", "", self.row["source"])
        return "/".join(re.split(r"[/ ]", words)[:2])

    @property
    def trains(self) -> str:
        """What is trained."""
        return "adapters" if self.row.get("trains_adapters_alone") else "all weights"

    @property
    def device(self) -> str:
        """The kind of the device."""
        return re.split(r"[- /]", str(self.row["gpu_kind"]))[0]

    @property
    def error(self) -> float:
        """How far off the figure is foreseen, as a share of what was measured."""
        sizes = {"allocated": self.foreseen.allocated, "shown": self.foreseen.reserved + self.beside.mean}
        size = min(sizes.get(self.kind, self.foreseen.reserved), self.room)
        return abs(size / self.row["peak_memory_gib"] / GIB - 1)

    def is_within(self, program_error: float, pieces_error: float) -> bool:
        """Returns whether the 90 % interval of a plan has the figure, with these constants."""
        found = PeakForecast.of(
            micro_batch=1,
            live=LiveBytes(place="device", moments=()),
            **{name: getattr(self.foreseen, name) for name in ("allocated", "reserved", "least")},
            outside=self.beside,
            program_error=program_error,
            pieces_error=pieces_error,
        )
        measured = self.row["peak_memory_gib"] * GIB
        if self.kind == "allocated":
            low, high = interval(found.allocated)
            return low <= measured <= high
        # A plan's peak has the context.
        low, high = peak_interval(found, self.room)
        return low <= measured + (self.beside.mean if self.kind == "reserved" else 0.0) <= high


def peaks(rows: Iterable[Mapping[str, Any]], store: Path) -> list[Peak]:
    """Returns the peaks of runs that ended well, of rows that say whether they recompute, by today's code."""
    found = []
    for row in rows:
        is_peak = row.get("peak_memory_gib") and row.get("memory_kind") in _KINDS
        if not is_peak or lacks(row) or not is_decided(row) or not row_bytes.is_current(row, store):
            continue
        foreseen = row_bytes.known(row, store)
        if isinstance(foreseen, RowBytes):
            beside, room = outside(row, program_of(row)), capacity(row)
            found.append(Peak(row, foreseen, beside, room))
            if size := row.get("peak_nvidia_smi_gib"):
                # The same run has both figures.
                shown = {**row, "memory_kind": "shown", "peak_memory_gib": size}
                found.append(Peak(shown, foreseen, beside, room))
    return found


def fitted(some: Sequence[Peak]) -> tuple[float, float]:
    """Returns the constants by which intervals have the peaks, each source weighed by the root of its rows."""
    allocated = [each for each in some if each.kind == "allocated"]
    others = [each for each in some if each.kind != "allocated"]
    program = _of_allocated(allocated)
    return program, _width(others, lambda each, value: each.is_within(program, value), 6.0)


def _of_allocated(some: Sequence[Peak]) -> float:
    return _width(some, lambda each, value: each.is_within(value, 0.0), 0.5)


def _width(some: Sequence[Peak], has: Callable[[Peak, float], bool], most: float) -> float:
    """Returns the value by which enough peaks are held, from all values by which one of them just is.

    Those are more than the interval promises, because few of them say less of the next one than of themselves: the
    correction of split conformal prediction (Lei et al., arXiv 1604.04173). A source counts by the root of its rows, so
    as many as would weigh the same are fewer than the rows.

    Few peaks decide so high a quantile. One of them alone, as split conformal prediction takes it, lets the width jump
    to its neighbour if another row comes. So all count, by how likely each is to be the quantile (Harrell and Davis,
    Biometrika 69, 1982; with weights: Akinshin, arXiv 2304.07265).
    """
    if not some:
        return most
    count = Counter(each.source for each in some)
    needed = sorted((_threshold(each, has, most), 1 / math.sqrt(count[each.source])) for each in some)
    values, weights = (np.array(each) for each in zip(*needed, strict=True))
    alike = float(weights.sum() ** 2 / (weights**2).sum())
    share = INTERVAL * (alike + 1) / alike
    if share >= 1:
        return round(float(values[-1]), 3)
    below = np.minimum(1.0, np.cumsum(weights) / weights.sum())
    chances = np.diff(betainc((alike + 1) * share, (alike + 1) * (1 - share), below), prepend=0.0)
    return round(float(chances @ values), 3)


def _threshold(one: Peak, has: Callable[[Peak, float], bool], most: float) -> float:
    low, high = 0.0, most
    for _ in range(_TRIES):
        middle = (low + high) / 2
        if has(one, middle):
            high = middle
        else:
            low = middle
    return high


def left_out(some: Sequence[Peak], of: Callable[[Peak], str]) -> dict[str, dict[str, Any]]:
    """Returns how many peaks of each part are in intervals that come from all other parts."""
    found = {}
    for part in sorted({of(each) for each in some}):
        others, own = [each for each in some if of(each) != part], [each for each in some if of(each) == part]
        if others:
            constants = fitted(others)
            found[part] = {"rows": len(own), "within": sum(each.is_within(*constants) for each in own)}
    return found


def unlike(some: Sequence[Peak]) -> float:
    """Returns how much wider an interval has to be for what none of the peaks behind it is like.

    That is the widest of all kinds of training and of devices with four peaks, each left out. Of so few, all are held.
    """
    allocated, found = [each for each in some if each.kind == "allocated"], [1.0]
    for of in (lambda each: each.trains, lambda each: each.device):
        for part in {of(each) for each in allocated}:
            own, others = ([each for each in allocated if (of(each) == part) is is_own] for is_own in (True, False))
            if len(own) >= _FEW and others:
                found.append(_of_allocated(own) / _of_allocated(others))
    return round(max(found), 1)


def of_few_bits(some: Sequence[Peak], others: Sequence[Peak]) -> dict[str, dict[str, Any]]:
    """Returns how many peaks of quantised weights are in intervals that come from the sources of others."""
    found = {}
    constants = fitted([each for each in others if each.source not in {one.source for one in some}])
    for part in sorted({f"{each.kind}, {each.row['quantization']}" for each in some}):
        own = [each for each in some if f"{each.kind}, {each.row['quantization']}" == part]
        found[part] = {
            "rows": len(own),
            "within": sum(each.is_within(*constants) for each in own),
            "median_error": round(median(each.error for each in own), 3),
            "worst_error": round(max(each.error for each in own), 3),
        }
    return found


def results_of(some: Sequence[Peak]) -> dict[str, Any]:
    """Returns the constants, and the shares of left-out rows in their intervals."""
    program, pieces = fitted(some)
    of_sources: dict[str, list[tuple[bool, float]]] = defaultdict(list)
    for source in {each.source for each in some}:
        constants = fitted([each for each in some if each.source != source])
        for each in (each for each in some if each.source == source):
            judged = each.is_within(*constants), each.error
            for part in ("all", each.kind, each.trains, each.device, f"{each.kind}, {each.trains}"):
                of_sources[part].append(judged)
    weights = Counter(each.source for each in some)
    by_source = left_out(some, lambda each: each.source)
    held = sum(each["within"] / math.sqrt(weights[source]) for source, each in by_source.items())
    return {
        "PROGRAM_ERROR": program,
        "PIECES_ERROR": pieces,
        "UNLIKE": unlike(some),
        "each source left out": {
            part: {
                "rows": len(own),
                "share": round(sum(is_in for is_in, _ in own) / len(own), 3),
                "median_error": round(median(error for _, error in own), 3),
            }
            for part, own in sorted(of_sources.items())
        },
        "held, each source by the root of its rows": round(held / sum(map(math.sqrt, weights.values())), 3),
        "by source": by_source,
        "what is trained left out": left_out(some, lambda each: each.trains),
        "device left out": left_out(some, lambda each: each.device),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the constants, and writes how they hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--to", type=Path, default=RESULTS)
    chosen = parser.parse_args(arguments)
    some = [each for file, store in ((ROWS, STORE), (GRID_ROWS, GRID_STORE)) for each in peaks(read_rows(file), store)]
    # Other code stands for the kernels of quantised weights. So their peaks are judged, and decide no width.
    quantized = [each for each in some if each.row.get("quantization")]
    some = [each for each in some if each not in quantized]
    results = {**results_of(some), "weights of few bits": of_few_bits(quantized, some)}
    chosen.to.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
