"""Thousands of simulated confirmations: how often an interval is wrong, and how often a true gain is found.

    python -m benchmarks.confirm_aa.simulated

The product's own `Confirmation` chooses what is measured, for how long, and what is said. Only the readings are drawn:
noise of a process, drift of the machine, bursts of other programs, contenders that vary differently, and samples of
unequal length. The true gain is that of a training: all samples over all time.
"""

import argparse
import json
import math
import random
import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from zerotune.trial_lib.messages.statistics import ratios_to
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.records.units import name_of
from zerotune.trial_lib.study.confirmation import ERROR, Confirmation, Contender
from zerotune.trial_lib.study.finding import Finding

RESULTS = Path(__file__).parents[1] / "results"
REAL = RESULTS / "confirm_aa.json"
GAINS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.5, 3.0)
SECONDS_A_TRIAL = 100.0
FOLLOWED = 200  # of the confirmations of a cell that say how many more rounds, so many get them
WORTH = 1.02  # below it a gain is settled too: it is too small
LOOKS = {3: 1, 8: 2, 24: 4}  # of a confirmation that can afford so many rounds, beside the first of several
# Returns what measures the contenders of one confirmation, by their true gains.
Draw = Callable[[dict[str, float]], Callable[[str], float]]


@dataclass(frozen=True)
class Machine:
    """How readings vary, as shares."""

    process: float  # from process to process
    drift: float = 0.0  # of the machine's speed, from one trial to the next
    bursts: float = 0.0  # the share of trials that another program disturbs, for half of their time at the mean
    others_process: float | None = None  # of the candidates, if they vary otherwise
    bursts_of_others: float = 0.0  # the share of a candidate's own trials that are disturbed
    lengths: float = 0.0  # deviation of the logarithms of the samples' lengths


MACHINES = {
    "a GPU": Machine(0.005, drift=0.002),
    "a quiet host": Machine(0.02, drift=0.01),
    "a shared host": Machine(0.05, drift=0.02, bursts=0.05),
    "a noisy host": Machine(0.13, drift=0.02, bursts=0.05),
    "bursts on a quiet host": Machine(0.02, bursts=0.1),
    "candidates vary more": Machine(0.02, others_process=0.08),
    "candidates vary less": Machine(0.08, others_process=0.02),
    "bursts hit candidates": Machine(0.02, bursts_of_others=0.1),
    "samples of unequal length": Machine(0.01, lengths=0.5),
    "samples of very unequal length": Machine(0.01, lengths=1.0),
}

# Seconds of a sample in the fresh processes of `run.py`, in their order
RECORDED = [seconds for each in json.loads(REAL.read_text())["each"] for seconds in each["seconds_a_sample"]]
PLACES = random.Random(0)


class Readings:
    """Draws the seconds of a sample, of one confirmation after another."""

    def __init__(self, machine: Machine, seed: int) -> None:
        self._machine = machine
        self._rng = np.random.default_rng(seed)
        self._windows = np.ones((1, 2)) if not machine.lengths else _windows(machine.lengths, self._rng)
        self._truth = self._windows.mean(axis=0)

    def of(self, gains: dict[str, float]) -> Callable[[str], float]:
        """Returns what measures one contender; each round has other samples, the same for all contenders."""
        rng, machine = self._rng, self._machine
        level, measured, window = 0.0, set(gains), self._windows[0]
        own_burst = 1.0 + machine.bursts_of_others * 0.5  # what a training of a candidate pays at the mean

        def measure(key: str) -> float:
            nonlocal level, window
            if key in measured:
                measured.clear()
                window = self._windows[rng.integers(len(self._windows))] / self._truth
            measured.add(key)
            level += rng.normal(0.0, machine.drift)
            is_own = key == "own"
            scatter = machine.process if is_own or machine.others_process is None else machine.others_process
            share = machine.bursts if is_own else machine.bursts + machine.bursts_of_others
            # The mean over processes is what a training of many hours gets.
            time = math.exp(level + rng.normal(-(scatter**2) / 2, scatter))
            time *= 1.0 + (rng.exponential(0.5) if rng.random() < share else 0.0)
            return time * float(window[0 if is_own else 1]) / gains[key] / (1.0 if is_own else own_burst)

        return measure


def _windows(sigma: float, rng: np.random.Generator) -> np.ndarray:
    """Seconds of a sample in windows of 24 steps of two ranks, at 16 micro-batches of 1 sample and at 1 of 16."""
    lengths = np.clip(np.exp(rng.normal(math.log(40), sigma, (5000, 24, 2, 16))), 4, 600)
    alone = (8.0 + lengths).sum(axis=-1).max(axis=-1).mean(axis=-1)
    padded = (8.0 + 16.0 * lengths.max(axis=-1)).max(axis=-1).mean(axis=-1)
    return np.stack([alone, padded], axis=1)


def contenders(count: int) -> list[Contender]:
    """The user's configuration and some candidates, that all read alike."""
    found = []
    for place, key in enumerate(("own", "a", "b", "c")[: count + 1]):
        candidate = Candidate(knobs={"zero_optimization": {"stage": place}}, micro_batch_size=4, slots=1)
        found.append(Contender(candidate, candidate.complete({}), reading(key, 1.0)))
    return found


def reading(key: str, seconds: float) -> TrialResult:
    return TrialResult(
        trial_id=key,
        number=0,
        purpose=Purpose.CONFIRM,
        config_hash=key,
        outcome=Outcome.COMPLETED,
        metrics={"throughput": 1.0 / seconds},
        phases={"steps": SECONDS_A_TRIAL},
    )


def confirm(
    members: Sequence[Contender], measure: Callable[[str], float], rounds: int
) -> tuple[Finding, dict[str, list[float]]]:
    """Confirms to the end, of a search that can afford so many rounds; with the seconds of each contender."""
    own, *others = members
    confirmation = Confirmation(own, others, "throughput", 2.0 * SECONDS_A_TRIAL * rounds * len(members))
    keys = {id(one.candidate): one.key for one in members}
    seconds: dict[str, list[float]] = {one.key: [] for one in members}
    while (asked := confirmation.next) is not None:
        key = keys[id(asked)]
        seconds[key].append(measure(key))
        confirmation.tell(reading(key, seconds[key][-1]))
    return confirmation.finding(), seconds


def cell(draw: Draw, gains: dict[str, float], times: int, rounds: int = 24) -> dict[str, Any]:
    """What some confirmations say, beside the true gains of their contenders."""
    members = contenders(len(gains) - 1)
    names = {one.key: name_of(one.candidate) for one in members}
    truths = {names[key]: gain for key, gain in gains.items()}
    counts = Counter[str]()
    ran, beyond, foreseen, settled, as_it_seemed, never = [], [], [], [], [], 0
    for _ in range(times):
        measure = draw(gains)
        found, seconds = confirm(members, measure, rounds)
        ran.append(found.rounds)
        told = [(one, one.gain) for one in found.candidates if one.gain is not None]
        counts.update({one.verdict for one, _ in told})
        counts["missed"] += any(not gain.low <= truths[one.name] <= gain.high for one, gain in told)
        if found.winner is not None and found.winner.gain is not None:
            beyond.append(found.winner.gain.value / truths[found.winner.name] - 1.0)
        if found.more_rounds:
            foreseen.append(found.more_rounds)
        never += bool(found.varies)
        if found.more_rounds and len(settled) < FOLLOWED:
            seems = {one.name: one.gain.value for one in found.candidates if one.gain is not None}
            seemed = {key: seems.get(names[key], 1.0) for key in gains}
            settled.append(settles(measure, seconds, found.more_rounds, LOOKS[rounds]))
            as_it_seemed.append(settles(draw(seemed), seconds, found.more_rounds, LOOKS[rounds]))
    return {
        "called faster": counts["faster"] / times,
        "called slower": counts["slower"] / times,
        "an interval misses the truth": counts["missed"] / times,
        "rounds": round(statistics.fmean(ran), 1),
        "stated gain beyond the true one": round(statistics.fmean(beyond), 4) if beyond else None,
        "says how many more rounds": len(foreseen) / times,
        "says that the most rounds would not settle it": never / times,
        "more rounds, median": statistics.median(foreseen) if foreseen else None,
        "settled by then": round(statistics.fmean(settled), 3) if settled else None,
        "settled by then, if all are as fast as they seemed": round(statistics.fmean(as_it_seemed), 3)
        if settled
        else None,
    }


def settles(measure: Callable[[str], float], seconds: dict[str, list[float]], more: int, looks: int) -> bool:
    """Whether that many more rounds of the same contenders do tell."""
    rounds = [dict(zip(seconds, values, strict=True)) for values in zip(*seconds.values(), strict=True)]
    rounds += [{key: measure(key) for key in seconds} for _ in range(more)]
    rounds = [{key: 1.0 / value for key, value in each.items()} for each in rounds]
    gains = ratios_to("own", rounds, ERROR / looks / (len(seconds) - 1)).values()
    best = max(gains, key=lambda gain: gain.value)
    return best.low > 1.0 or best.high < WORTH


def recorded(gains: dict[str, float]) -> Callable[[str], float]:
    """Measures by readings that two real ranks took one after the other, from any of them on."""
    place = PLACES.randrange(len(RECORDED))

    def measure(key: str) -> float:
        nonlocal place
        place = (place + 1) % len(RECORDED)
        return RECORDED[place] / gains[key]

    return measure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--times", type=int, default=2000, help="confirmations of each cell")
    parser.add_argument("--out", type=Path, default=RESULTS / "confirm_simulated.json")
    options = parser.parse_args()
    found: dict[str, dict[str, Any]] = {}
    draws: dict[str, Draw] = {name: Readings(machine, seed=0).of for name, machine in MACHINES.items()}
    draws["two real ranks, read again"] = recorded
    for name, draw in draws.items():
        for gain in GAINS:
            found.setdefault(name, {})[f"{gain:.2f}"] = cell(draw, {"own": 1.0, "a": gain}, options.times)
        same = {"own": 1.0, "a": 1.0, "b": 1.0, "c": 1.0}
        found[name]["three of 1.00"] = cell(draw, same, options.times // 2)
        found[name]["three of 1.05, 1.03, 1.00"] = cell(draw, {**same, "a": 1.05, "b": 1.03}, options.times // 2)
        for rounds in (3, 8):
            found[name][f"1.00, time for {rounds} rounds"] = cell(draw, {"own": 1.0, "a": 1.0}, options.times, rounds)
        print(name, json.dumps(found[name], indent=2), flush=True)
        options.out.write_text(json.dumps({"confirmations of a cell": options.times, **found}, indent=2) + "\n")


if __name__ == "__main__":
    main()
