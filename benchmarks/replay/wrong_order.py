"""What a wrong order of the arms costs: trials to within 5 % of the best, beside a search that expects no order.

Each drawn surface is searched three times by `adaptive`, with plans of all arms that have the true order, none (all
arms equal), and the reverse. A search that comes nowhere near counts with one trial more than its budget. Two figures
are given: trials until the answer stays that near, and until it is so near for the first time. Readings vary by up to
9 %, so the former also has the trials in which a lucky reading leads. A search without an order that reads anew
(`again`) shows how much two searches differ by their readings alone.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from math import exp
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, median, quantiles

from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import create
from benchmarks.replay.regret import Course
from benchmarks.replay.surfaces import SurfaceWorld
from zerotune.trial_lib.search.base import ExpectedArm, key_of
from zerotune.trial_lib.search.cost_model import HALF_SIZE

RESULTS = Path(__file__).parents[1] / "results" / "replay_wrong_order.json"
WORLD, NEAR = "shuffled order", 0.05
ORDERS = ("true", "none", "reverse")
_AGAIN = 1000  # what is added to the seed of the readings


def planned(world: SurfaceWorld, order: str) -> None:
    """Gives searches a plan in which the arms' speeds have an order. Its memory is right: each arm has the largest
    micro-batch that fits, as in any plan.
    """
    arms, base = world.problem.space.arms, world.problem.base_config
    costs = [{"true": cost, "none": 0.0, "reverse": -cost}[order] for cost in world.arm_costs]
    first = None if order == "none" else min(range(len(arms)), key=lambda place: costs[place])
    expected = []
    for place, (arm, cost) in enumerate(zip(arms, costs, strict=True)):
        size = max(1, world.largest_size_of(arm.family(0)))
        speed = exp(-cost) / (1 + HALF_SIZE / size)
        expected.append(
            ExpectedArm(
                key=key_of(arm, base),
                label=arm.label,
                micro_batch=size,
                samples_per_s=speed,
                is_first=place == first,
            )
        )
    world.problem = replace(world.problem, expected=tuple(expected))


def trials_of(trials: int, seed: int) -> dict[str, tuple[float, float]]:
    """Returns the trials that the search needs on a surface, for good and for the first time, by the expected order."""
    needed = {}
    for order in (*ORDERS, "again"):
        world, readings = SurfaceWorld(WORLD, seed), seed + _AGAIN * (order == "again")
        planned(world, "none" if order == "again" else order)
        search = create("adaptive", world, readings, trials)
        course = Course.of(simulate(search, world, readings, stops_hopeless=True), world)
        regrets = (course.start, *course.regrets)
        first = next((trial for trial, regret in enumerate(regrets, start=1) if regret <= NEAR), trials + 1)
        needed[order] = min(course.trials_within(NEAR), trials + 1), first
    return needed


def lost(needed: Sequence[Mapping[str, tuple[float, float]]], order: str, which: int) -> dict[str, float]:
    """Returns what an order costs beside none: for good (0), or for the first time (1)."""
    more = [each[order][which] - each["none"][which] for each in needed]
    return {
        "median": median(more),
        "mean": round(fmean(more), 2),
        "q90": quantiles(more, n=10)[-1],
        "share_above_3": round(fmean(each > 3 for each in more), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    with Pool(arguments.processes) as pool:
        needed = pool.map(partial(trials_of, arguments.trials), seeds)
    record = {
        "command": "python -m benchmarks.replay.wrong_order " + " ".join(sys.argv[1:]),
        "seeds": arguments.seeds,
        "first_seed": arguments.first_seed,
        **{
            name: {
                "trials_needed": {order: median(each[order][which] for each in needed) for order in ORDERS},
                "trials_needed_mean": {
                    order: round(fmean(each[order][which] for each in needed), 2) for order in ORDERS
                },
                "lost_by_a_wrong_order": lost(needed, "reverse", which),
                "lost_by_other_readings": lost(needed, "again", which),
            }
            for which, name in enumerate(("for_good", "for_the_first_time"))
        },
    }
    print(json.dumps(record, indent=2))
    arguments.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
