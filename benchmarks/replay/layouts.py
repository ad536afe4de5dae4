"""What `zerotune plan --layouts` says, held against whole grids of launches: `python -m benchmarks.replay.layouts`.

Its candidates are the launches of a world, and its formulas are those of a plan. `megatron.py` has what frameworks do
otherwise. Two numbers were found on launches, of worlds that are not held out: how many operations a layer of one
framework has, and how far off groups over several hosts may be. Every third world is held out, in the order of model,
devices, length and batch.
"""

import argparse
import json
import math
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

import numpy as np

from benchmarks.replay.grids import GRIDS, read_worlds
from benchmarks.replay.megatron import Launch
from zerotune.trial_lib.plan.layouts import best_layouts
from zerotune.trial_lib.plan.plan_record import LIKELY
from zerotune.trial_lib.plan.step_time import reaches_over_hosts

RESULTS = Path(__file__).parents[1] / "results" / "replay_layouts.json"
_NAMED = 3  # that a person would launch
_FEW_HOSTS = 4


def speed_of(launch: Launch) -> float:
    """Samples/s as measured; 0 if it failed."""
    row = launch.row
    if row["outcome"] != "completed":
        return 0.0
    samples = row["micro_batch"] * row["grad_accum"] * launch.replicas
    return float(row.get("samples_per_s") or samples / row["step_time_s"])


def judged(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The figures of one world."""
    launches = [Launch(row) for row in rows]
    capacity = launches[0].cluster.device.memory
    measured = {id(each.decoder): speed_of(each) for each in launches}
    said = [(each.fits(capacity) >= LIKELY and each.is_possible, measured[id(each.decoder)] > 0) for each in launches]
    ran = [each for each in launches if measured[id(each.decoder)]]
    errors = [math.log(each.samples_per_s / measured[id(each.decoder)]) for each in ran]
    within: dict[bool, list[float]] = {False: [], True: []}
    are_in = {False: 0, True: 0}
    for each, error in zip(ran, errors, strict=True):
        reaches = reaches_over_hosts(each.as_run(), each.cluster)
        within[reaches].append(round(error, 3))
        are_in[reaches] += each.step.low <= each.step.seconds * math.exp(error) <= each.step.high
    best = max(measured.values())
    named = best_layouts((each.decoder for each in launches if each.is_possible), capacity)
    found = [measured[id(each)] for each in named]
    completed = [(each.step.samples_per_s, speed) for each, speed in zip(named, found, strict=True) if speed]
    return {
        "hosts": launches[0].cluster.hosts,
        "launches": len(launches),
        "said_to_fit": [sum(told and did for told, did in said), sum(told for told, _ in said)],
        "said_not_to_fit": [sum(not told and not did for told, did in said), sum(not told for told, _ in said)],
        "in_interval": [sum(are_in.values()), len(ran)],
        "in_interval_over_hosts": [are_in[True], len(within[True])],
        "errors_over_hosts": within[True],  # logarithms of foreseen over measured speed
        "errors_of_others": within[False],
        "speed_error": round(math.exp(median(map(abs, errors))) - 1, 4),
        "too_fast": round(math.exp(median(errors)), 4),
        "order_of_launches": _rank_correlation(
            [each.samples_per_s for each in ran], [measured[id(each.decoder)] for each in ran]
        ),
        "layouts": len(named),
        "order_of_layouts": _rank_correlation(*zip(*completed, strict=True)) if len(completed) > 2 else None,
        "regret_of_first": round(1 - found[0] / best, 4),
        "regret_of_named": round(1 - max(found[:_NAMED]) / best, 4),
        "named_failed": found[:_NAMED].count(0.0),
    }


def _rank_correlation(one: Sequence[float], other: Sequence[float]) -> float:
    ranks = [np.argsort(np.argsort(each)) for each in (one, other)]
    return round(float(np.corrcoef(*ranks)[0, 1]), 3)


def summed_up(worlds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Medians and means over worlds."""

    def over(name: str) -> list[float]:
        values = [each[name] for each in worlds if each[name] is not None]
        return [round(median(values), 3), round(fmean(values), 3), round(max(values), 3), round(min(values), 3)]

    names = ("speed_error", "too_fast", "order_of_launches", "order_of_layouts", "regret_of_first", "regret_of_named")
    sums = {name: [sum(each[name][place] for each in worlds) for place in (0, 1)] for name in _SAID}
    failed = sum(each["named_failed"] for each in worlds)
    named = sum(min(_NAMED, each["layouts"]) for each in worlds)
    errors = {name: of for name in _ERRORS if (of := sorted(error for each in worlds for error in each[name]))}
    return {
        "worlds": len(worlds),
        **sums,
        "named_failed": [failed, named],
        **{name: over(name) for name in names},
        **{name: [_off(median(map(abs, each))), _off(each[-1 - len(each) // 20])] for name, each in errors.items()},
    }


def _off(error: float) -> float:
    return round(math.exp(error) - 1, 3)


_SAID = ("said_to_fit", "said_not_to_fit", "in_interval", "in_interval_over_hosts")
_ERRORS = ("errors_over_hosts", "errors_of_others")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=GRIDS)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    worlds: dict[str, dict[str, Any]] = {}
    for place, (key, rows) in enumerate(sorted(read_worlds(arguments.rows).items())):
        model, devices, tokens, _ = key
        name = f"{model.split(' (')[0]}, {devices} devices, {tokens} tokens"
        worlds[name] = {"held_out": place % 3 == 2, **judged(rows)}
        print(name, worlds[name], flush=True)
    parts = {
        "all": list(worlds.values()),
        "held out": [each for each in worlds.values() if each["held_out"]],
        "not held out": [each for each in worlds.values() if not each["held_out"]],
        "held out, up to 4 hosts": [
            each for each in worlds.values() if each["held_out"] and each["hosts"] <= _FEW_HOSTS
        ],
        "up to 4 hosts": [each for each in worlds.values() if each["hosts"] <= _FEW_HOSTS],
        "more hosts": [each for each in worlds.values() if each["hosts"] > _FEW_HOSTS],
    }
    record = {
        "command": "python -m benchmarks.replay.layouts " + " ".join(sys.argv[1:]),
        "figures": "median, mean, largest, smallest; of errors the median, and the largest but one in twenty",
        **{name: summed_up(of) for name, of in parts.items()},
        "worlds": worlds,
    }
    for name in parts:
        print(name, json.dumps(record[name]))
    for name in _ERRORS:
        for world in worlds.values():
            del world[name]
    arguments.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
