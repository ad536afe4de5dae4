"""Searches of clusters with and without a plan: `python -m benchmarks.replay.with_plan [--seeds 8] [--minutes 4]`.

Both searches of a pair have the same seed. The command goes on where it was ended.
"""

import argparse
import json
import math
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

from benchmarks.replay.cluster import CLUSTERS
from benchmarks.replay.run import TABLES, course_of

FORESEEN = Path(__file__).parents[1] / "memory_model" / "foreseen"
RESULTS = Path(__file__).parents[1] / "results" / "replay_with_plan.json"
BUDGETS = (3, 5, 10, 20)


def pair(world: str, seed: int) -> dict[str, dict[str, float]]:
    """Returns the figures of both searches."""
    found = {}
    for name, foreseen in (("without", None), ("with", FORESEEN)):
        _, _, course = course_of((world, TABLES, foreseen, "adaptive", seed, max(BUDGETS), 1))
        regrets = {str(trials): round(course.after_trials(trials), 4) for trials in BUDGETS}
        found[name] = {**regrets, "failed": round(course.out_of_memory, 4)}
    return found


def compared(pairs: Sequence[dict[str, dict[str, float]]]) -> dict[str, Any]:
    """Returns means with and without, and the mean difference with its standard error."""
    found: dict[str, Any] = {}
    for name in (*map(str, BUDGETS), "failed"):
        both = [[each[which][name] for each in pairs] for which in ("without", "with")]
        more = [its - mine for mine, its in zip(*both, strict=True)]
        error = stdev(more) / math.sqrt(len(more)) if len(more) > 1 else math.inf
        found[name] = {
            "without": round(fmean(both[0]), 4),
            "with": round(fmean(both[1]), 4),
            "more": round(fmean(more), 4),
            "error": round(error, 4),
        }
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--first-seed", type=int, default=5000)
    parser.add_argument("--worlds", nargs="+", default=[*CLUSTERS], choices=CLUSTERS)
    parser.add_argument("--minutes", type=float, default=600.0, help="begin no pair after so many (%(default)g)")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    until = time.monotonic() + 60 * chosen.minutes
    record = json.loads(chosen.results.read_text()) if chosen.results.exists() else {"pairs": {}}
    pairs: dict[str, dict[str, Any]] = record["pairs"]
    for seed in range(chosen.first_seed, chosen.first_seed + chosen.seeds):
        for world in chosen.worlds:
            of_world = pairs.setdefault(world, {})
            if str(seed) in of_world or time.monotonic() > until:
                continue
            of_world[str(seed)] = pair(world, seed)
            record["worlds"] = {name: compared([*each.values()]) for name, each in pairs.items() if each}
            chosen.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            print(world, seed, of_world[str(seed)], flush=True)
    for world, figures in record["worlds"].items():
        shown = "  ".join(
            f"{name}: {100 * each['without']:.1f} -> {100 * each['with']:.1f}" for name, each in figures.items()
        )
        print(f"{world} ({len(pairs[world])}): {shown}")


if __name__ == "__main__":
    main()
