"""Whether the interval of a gain contains the gain over a whole epoch, where steps differ with their data.

Real ranks train for an epoch with each way to cut a batch, and their steps are recorded. Then studies confirm a cut
against another one with the product's own functions. A simulated trial is a window of the recorded steps, times a
factor of its process. Some confirmations run real trials instead.
"""

import argparse
import json
import math
import platform
import random
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import config_hash
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.starters import WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.rank.probe import is_enough
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.confirmation import Confirmation, Contender
from zerotune.trial_lib.study.data_window import DataWindow, offset_of_round
from zerotune.trial_lib.study.finding import Finding

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "confirm_data.json"
DATA = (("shuffled", 0.0), ("shuffled", 0.5), ("shuffled", 1.0), ("sorted", 1.0), ("bucketed", 1.0), ("packed", 1.0))
CUTS = ((1, 8), (2, 4), (8, 1))  # micro-batch and accumulation
PAIRS = ((0, 2), (1, 2), (0, 0))
SAMPLES, BATCH = 8192, 16
REAL = (("shuffled", 1.0), ("sorted", 1.0), ("bucketed", 1.0))
# The standard deviation of what a process differs from another, as a share.
PROCESS = 0.03
CONFIG = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}, "steps_per_print": 10_000}
BUILDERS = ["ShareMemCommBuilder"]
WINDOW = StepWindow()
Measure = Callable[[TrialPlan], TrialResult]


class Trials:
    """Runs the program of unequal lengths on two ranks."""

    def __init__(self, work: Path) -> None:
        self._work, self._count = work, 0
        self._starter = WarmStarter(sys.executable, BUILDERS, rank_environment(), str(work / "server.log"), print)

    def plan(self, order: str, sigma: float, cut: tuple[int, int]) -> TrialPlan:
        self._count += 1
        candidate = Candidate(micro_batch_size=cut[0], gradient_accumulation_steps=cut[1], slots=2)
        config, paths = candidate.complete(CONFIG), TrialPaths(self._work / f"{self._count:04d}")
        words = [f"--{name}={value}" for name, value in (("order", order), ("sigma", sigma), ("samples", SAMPLES))]
        return TrialPlan(
            trial_id=paths.root.name,
            number=self._count,
            purpose=Purpose.CONFIRM,
            candidate=candidate,
            ds_config=config,
            config_hash=config_hash(config),
            program=Program(
                sys.executable,
                {"script": "lengths.py"},
                ["--deepspeed_config", str(paths.ds_config), *words],
                "",
                ROOT / "tests" / "programs",
                rank_environment(),
            ),
            deadline_s=300,
            paths=paths,
            window=WINDOW,
            memory_limit=None,
        )

    def run(self, plan: TrialPlan) -> TrialResult:
        locks = self._work / "locks"
        result = ThisHost(self._starter, this_host(), locks).run_trial(plan, threading.Event())
        assert result.outcome is Outcome.COMPLETED, result.reason
        return result

    def close(self) -> None:
        self._starter.close()


def record(trials: Trials, order: str, sigma: float) -> list[dict[str, Any]]:
    """The steps of an epoch with each cut, and what a trial takes beside them."""
    found = []
    for cut in CUTS:
        # About as many rows of one length as there are sentences in them.
        steps = (SAMPLES if order != "packed" else SAMPLES // 8) // BATCH - WINDOW.start_step
        whole = StepWindow(WINDOW.start_step, WINDOW.start_step + steps - 1, max_steps=steps)
        result = trials.run(replace(trials.plan(order, sigma, cut), window=whole))
        beside = sum(result.phases.values()) - sum(result.step_times)
        spread = result.metrics["data_spread"]
        found.append({"cut": cut, "steps": result.step_times, "beside_s": beside, "data_spread": spread})
        print(order, sigma, cut, f"{statistics.fmean(result.step_times):.4f} s a step", flush=True)
    return found


def contender(name: str, reading: TrialResult, cut: tuple[int, int]) -> Contender:
    candidate = Candidate(micro_batch_size=cut[0], gradient_accumulation_steps=cut[1], slots=2)
    return Contender(candidate, candidate.complete(CONFIG), replace(reading, config_hash=name))


def window_of(recorded: dict[str, Any], first: int, count: int, factor: float = 1.0) -> TrialResult:
    """A trial that has counted these of the recorded steps."""
    steps = recorded["steps"]
    times = [factor * steps[(first + place) % len(steps)] for place in range(count)]
    latency = statistics.fmean(times)
    metrics = {"throughput": BATCH / latency, "latency": latency, "data_spread": recorded["data_spread"]}
    return TrialResult(
        trial_id="s",
        number=1,
        purpose=Purpose.CONFIRM,
        config_hash="",
        outcome=Outcome.COMPLETED,
        metrics={**metrics, "measured_steps": float(count)},
        step_times=times,
        phases={"start": recorded["beside_s"], "steps": sum(times)},
        data_offset=first,
        data_places=len(steps),
    )


def steps_of_search(recorded: dict[str, Any], first: int) -> int:
    """The steps that a trial of the search counts from there on."""
    steps = recorded["steps"]
    times = [steps[(first + place) % len(steps)] for place in range(WINDOW.max_steps)]
    return next(count for count in range(WINDOW.min_steps, WINDOW.max_steps + 1) if is_enough(WINDOW, times[:count]))


def confirm(
    pair: Sequence[dict[str, Any]], data_vary: bool, measure: Callable[[DataWindow, int, int], TrialResult]
) -> Finding:
    """Confirms the second of two cuts against the first. `measure` gets the window, the round, and which of both."""
    own, other = (
        contender(name, window_of(one, 0, WINDOW.min_steps), one["cut"])
        for name, one in zip(("own", "other"), pair, strict=True)
    )
    # Equal candidates would be told apart by nothing.
    other = replace(other, candidate=other.candidate.model_copy())
    confirmation = Confirmation(own, [other], "throughput", 120.0, data_vary=data_vary)
    while (asked := confirmation.next) is not None:
        which = int(asked is other.candidate)
        result = measure(confirmation.data, confirmation.begun, which)
        confirmation.tell(replace(result, config_hash=("own", "other")[which]))
    return confirmation.finding()


def gain_over_epoch(pair: Sequence[dict[str, Any]]) -> float:
    return float(statistics.fmean(pair[0]["steps"]) / statistics.fmean(pair[1]["steps"]))


def simulate(pair: Sequence[dict[str, Any]], data_vary: bool, studies: int, moves: bool) -> dict[str, Any]:
    """Confirms in so many studies; not `moves`: with the first batches in all rounds, and the search's window."""
    truth, inside, found = gain_over_epoch(pair), 0, []
    for seed in range(studies):
        draws = random.Random(f"{seed} {truth}")

        def measure(data: DataWindow, number: int, which: int, seed: int = seed, draws: Any = draws) -> TrialResult:
            first = int(offset_of_round(seed, number) * len(pair[which]["steps"])) if moves else 0
            count = data.samples // BATCH if moves and data.samples else steps_of_search(pair[which], first)
            return window_of(pair[which], first, count, math.exp(draws.gauss(0.0, PROCESS)))

        finding = confirm(pair, data_vary, measure)
        gain = finding.candidates[0].gain
        assert gain is not None
        inside += gain.low <= truth <= gain.high
        counted = finding.own.metrics["measured_steps"] if finding.own else 0.0
        found.append((gain.value / truth - 1.0, (gain.high - gain.low) / 2 / gain.value, finding.rounds, counted))
    errors, halves, rounds, steps = (sorted(column) for column in zip(*found, strict=True))
    return {
        "contain_the_gain_of_an_epoch": inside / studies,
        "error_5_to_95": [round(errors[int(share * studies)], 4) for share in (0.05, 0.95)],
        "half_width": round(statistics.median(halves), 4),
        "rounds": statistics.median(rounds),
        "steps_of_a_trial": statistics.median(steps),
    }


def really(trials: Trials, order: str, sigma: float, pair: Sequence[dict[str, Any]], seed: int) -> dict[str, Any]:
    """Confirms with real trials, whose data begin where a study's would."""

    def measure(data: DataWindow, number: int, which: int) -> TrialResult:
        return trials.run(data.in_round(trials.plan(order, sigma, pair[which]["cut"]), seed, number))

    finding = confirm(pair, data_vary=sigma > 0.0, measure=measure)
    gain, truth = finding.candidates[0].gain, gain_over_epoch(pair)
    assert gain is not None
    return {
        **{"order": order, "sigma": sigma, "cuts": [one["cut"] for one in pair], "gain_of_an_epoch": round(truth, 4)},
        **{"gain": [round(each, 4) for each in (gain.value, gain.low, gain.high)], "rounds": finding.rounds},
        **{"contains": gain.low <= truth <= gain.high, "note": finding.of_data},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--studies", type=int, default=100, help="simulated confirmations of each pair of cuts")
    parser.add_argument("--real", type=int, default=1, help="confirmations with real trials, of each of three data")
    parser.add_argument("--recorded", action="store_true", help="take the steps of the last run's file")
    arguments = parser.parse_args()
    report: dict[str, Any] = {"recorded": [], "real": []}
    if arguments.recorded:
        report = json.loads(RESULTS.read_text())
    with tempfile.TemporaryDirectory(prefix="confirm-data-") as folder:
        trials = Trials(Path(folder))
        try:
            if not arguments.recorded:
                for order, sigma in DATA:
                    report["recorded"].append({"order": order, "sigma": sigma, "cuts": record(trials, order, sigma)})
            report["simulated"] = [row for data in report["recorded"] for row in simulated(data, arguments.studies)]
            write(report)
            for data in report["recorded"]:
                for seed in range(arguments.real if (data["order"], data["sigma"]) in REAL else 0):
                    pair = [data["cuts"][place] for place in (1, 2)]
                    report["real"].append(really(trials, data["order"], data["sigma"], pair, seed))
                    print(report["real"][-1], flush=True)
                    write(report)
        finally:
            trials.close()


def simulated(data: dict[str, Any], studies: int) -> list[dict[str, Any]]:
    """The confirmations of each pair of cuts with these data."""
    rows = []
    vary = data["sigma"] > 0.0 and data["order"] != "packed"
    for pair in PAIRS:
        cuts = [data["cuts"][place] for place in pair]
        named = {"order": data["order"], "sigma": data["sigma"], "cuts": [one["cut"] for one in cuts]}
        row = {**named, "gain_of_an_epoch": round(gain_over_epoch(cuts), 4)}
        row |= simulate(cuts, vary, studies, moves=True)
        before = simulate(cuts, vary, studies, moves=False)
        rows.append({**row, "contain_it_by_the_first_batches": before["contain_the_gain_of_an_epoch"]})
        print(rows[-1], flush=True)
    return rows


def write(report: dict[str, Any]) -> None:
    for data in report["recorded"]:
        for one in data["cuts"]:
            one["steps"] = [round(seconds, 6) for seconds in one["steps"]]
    settings = {
        "machine": platform.processor() or platform.machine(),
        "samples_of_an_epoch": SAMPLES,
        "spread_of_processes": PROCESS,
        "spread_of_processes_is": "drawn, not recorded",
    }
    RESULTS.write_text(json.dumps({**settings, **report}) + "\n")


if __name__ == "__main__":
    main()
