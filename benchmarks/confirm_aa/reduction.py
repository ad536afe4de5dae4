"""How often a change that is worth something is dropped from a winner, and one that is worth nothing stays.

    python -m benchmarks.confirm_aa.reduction

Simulated readings, and the product's own confirmation and reduction. A winner has one change worth a gain of 1.5, one
worth a share d, and two worth nothing. The search's model errs by 2 % about each, which it knows. A reading varies from
process to process: normally, with heavy tails (Student's t, 4 degrees of freedom), or beside a machine that gets slower
by 1 % a trial. A drop is wrong if the change is worth more than the margin of that study.
"""

import argparse
import json
import math
from collections.abc import Collection
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.changes import ChangedKnob
from zerotune.trial_lib.study.confirmation import Confirmation, Contender
from zerotune.trial_lib.study.reduction import Reduction

OUT = Path(__file__).parents[1] / "results" / "reduction.json"
PROCESSES = {"a GPU": 0.005, "processor time": 0.02, "the clock of a CPU": 0.05}
KINDS = ("normal", "heavy tails", "drift")
WORTHS = (0.0, 0.005, 0.01, 0.02, 0.04, 0.06, 0.1)
STUDIES = 300
ERROR_OF_SEARCH = 0.02  # of its model, about the worth of a change
# The search's seconds. A trial takes one, so the changes may be weighed in 50 or 15 trials.
BUDGETS = {"40 minutes of search": 200.0, "a minute": 60.0}
KNOBS = ("large", "weighed", "nothing", "neither")


@dataclass
class Changed:
    """The winner's changes, as `Changes` has them."""

    def __post_init__(self) -> None:
        self.all = tuple(ChangedKnob(name, True, None, is_fine=name != "large") for name in KNOBS)

    def without(self, dropped: Collection[ChangedKnob]) -> Candidate:
        gone = {change.path for change in dropped}
        return candidate([name for name in KNOBS if name not in gone])

    def left_in(self, reduced: Candidate) -> frozenset[str]:
        return frozenset(reduced.knobs["zero_optimization"])


def candidate(names: Collection[str]) -> Candidate:
    return Candidate(knobs={"zero_optimization": dict.fromkeys(names, True)}, micro_batch_size=4)


class Machine:
    """Reads configurations, one trial after another."""

    def __init__(self, rng: np.random.Generator, process: float, kind: str, worth: float) -> None:
        self._rng, self._process, self._kind = rng, process, kind
        self.worths = {"large": math.log(1.5), "weighed": -math.log(1.0 - worth)}
        self.trials = 0

    def level(self, one: Candidate) -> float:
        return sum(self.worths.get(name, 0.0) for name in one.knobs["zero_optimization"])

    def read(self, one: Candidate, purpose: Purpose = Purpose.CONFIRM) -> TrialResult:
        self.trials += 1
        tails = self._rng.standard_t(4) / math.sqrt(2) if self._kind == "heavy tails" else self._rng.normal()
        drift = -0.01 * self.trials if self._kind == "drift" else 0.0
        speed = 100.0 * math.exp(self.level(one) + self._process * tails + drift)
        return TrialResult(
            trial_id=str(self.trials),
            number=self.trials,
            purpose=purpose,
            config_hash=one.config_hash({}),
            outcome=Outcome.COMPLETED,
            metrics={"throughput": speed},
            losses=[2.0, 1.9, 1.8],
            phases={"steps": 1.0},
        )


def study(machine: Machine, rng: np.random.Generator, search_seconds: float) -> dict[str, float | None] | None:
    """None if the winner was not confirmed to be faster."""
    own, whole = (contender(one, machine) for one in (candidate([]), candidate(KNOBS)))
    confirmation = Confirmation(own, [whole], "throughput", search_seconds)
    while (one := confirmation.next) is not None:
        confirmation.tell(machine.read(one))
    found = confirmation.finding()
    if found.winner is None or found.winner.gain is None or found.winner.verdict != "faster":
        return None
    errors = {name: rng.normal(0.0, ERROR_OF_SEARCH) for name in KNOBS}
    confirmed = machine.trials

    def apart(one: Candidate, other: Candidate) -> tuple[float, float]:
        names, others = (set(each.knobs["zero_optimization"]) for each in (one, other))
        lost = sum(errors[name] + machine.worths.get(name, 0.0) for name in others - names)
        return lost, ERROR_OF_SEARCH * math.sqrt(len(others - names))

    reduction = Reduction(
        confirmation,
        whole,
        confirmation.gain_of(whole.key),
        Changed(),  # type: ignore[arg-type]
        {},
        apart,
        "throughput",
        1.0,
    )
    while (one := reduction.next) is not None:
        reduction.tell(machine.read(one))
    finding = reduction.applied(found, own.candidate)
    dropped = {name for worth in finding.worths if worth.verdict == "dropped" for name in worth.knobs}
    assert finding.winner is not None
    assert finding.winner.gain is not None
    gain = finding.winner.gain
    true = math.exp(sum(worth for name, worth in machine.worths.items() if name not in dropped))
    kept = {worth.knobs: worth.times for worth in finding.worths if worth.verdict == "kept"}
    alone = kept.get(("weighed",))
    return {
        "dropped": "weighed" in dropped,
        "wrong": "large" in dropped
        or ("weighed" in dropped and 1 - math.exp(-machine.worths["weighed"]) > reduction.margin),
        "of two worth nothing dropped": len(dropped & {"nothing", "neither"}) / 2,
        "gain held": gain.low <= true <= gain.high,
        "worth measured": alone is not None or "weighed" in dropped,
        "worth held": None if alone is None else alone.low <= math.exp(machine.worths["weighed"]) <= alone.high,
        "margin": reduction.margin,
        "trials": machine.trials - confirmed,
    }


def contender(one: Candidate, machine: Machine) -> Contender:
    reading = replace(machine.read(one, Purpose.SEARCH), metrics={"throughput": 100.0 * math.exp(machine.level(one))})
    return Contender(one, one.complete({}), reading)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=STUDIES)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, dict[str, float]]] = {}
    for budget, seconds in BUDGETS.items():
        for name, process in PROCESSES.items():
            for kind in KINDS if budget != "a minute" else KINDS[:1]:
                cell = found[f"{name}, {kind}, {budget}"] = {}
                for worth in WORTHS:
                    machines = [Machine(rng, process, kind, worth) for _ in range(options.studies)]
                    ends = [end for machine in machines if (end := study(machine, rng, seconds)) is not None]
                    means = {
                        key: round(float(np.mean(values)), 3)
                        for key in ends[0]
                        if (values := [end[key] for end in ends if end[key] is not None])
                    }
                    cell[f"worth {worth:.1%}"] = {"studies": len(ends), **means}
                print(f"{name}, {kind}, {budget}", json.dumps(cell), flush=True)
                options.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
