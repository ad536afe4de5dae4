"""What a wrong order of the arms costs: trials to within 5 % of the best, beside a search that expects no order.

Each drawn surface is searched three times by `adaptive`, with plans of all arms that have the true order, none (all
arms equal), and the reverse. A search that comes nowhere near counts with one trial more than its budget.
"""

import argparse
import json
import sys
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


def trials_of(trials: int, seed: int) -> dict[str, float]:
    """Returns the trials that the search needs on a surface, by the order that it expects."""
    needed = {}
    for order in ORDERS:
        world = SurfaceWorld(WORLD, seed)
        planned(world, order)
        course = Course.of(simulate(create("adaptive", world, seed, trials), world, seed, stops_hopeless=True), world)
        needed[order] = min(course.trials_within(NEAR), trials + 1)
    return needed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    with Pool(arguments.processes) as pool:
        needed = pool.map(partial(trials_of, arguments.trials), range(arguments.seeds))
    lost = [each["reverse"] - each["none"] for each in needed]
    record = {
        "command": "python -m benchmarks.replay.wrong_order " + " ".join(sys.argv[1:]),
        "seeds": arguments.seeds,
        "trials_needed": {order: median(each[order] for each in needed) for order in ORDERS},
        "trials_needed_mean": {order: round(fmean(each[order] for each in needed), 2) for order in ORDERS},
        "lost_by_a_wrong_order": {
            "median": median(lost),
            "mean": round(fmean(lost), 2),
            "q90": quantiles(lost, n=10)[-1],
        },
        "share_that_lost_more_than_3": round(fmean(each > 3 for each in lost), 3),
    }
    print(json.dumps(record, indent=2))
    arguments.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
