"""How many more trials `adaptive` needs with the switches of the program, on the cluster model.

Each cluster is replayed without switches and with them, with the same seeds. The number of trials is the one from which
on the median regret over the seeds stays within 3 %. Its standard error is that of the bootstrap over the seeds (Efron
and Tibshirani, An Introduction to the Bootstrap (1993), chapter 6).
"""

import argparse
import json
import random
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import Pool
from multiprocessing.pool import Pool as Processes
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replay.cluster import CLUSTERS
from benchmarks.replay.regret import Course
from benchmarks.replay.run import NEAR, TABLES, course_of
from benchmarks.replay.whole_cluster import WHOLE

RESULTS = Path(__file__).parents[1] / "results" / "replay_growth.json"
METHOD = "adaptive"
_DRAWS = 1000
_SHOWN = (5, 8, 10, 15, 20, 30)


@dataclass(frozen=True)
class Growth:
    """Trials to within a share of the best, without and with switches.

    Attributes:
        without: trials without switches; one more than the budget if that was not enough.
        with_switches: trials with them.
        factor: their ratio.
        error: the standard error of the ratio.
        share_above: the share of the draws in which the ratio is above the bar.
    """

    without: int
    with_switches: int
    factor: float
    error: float
    share_above: float


def trials_of_median(courses: Sequence[Course], share: float, budget: int) -> int:
    """Returns the trials, the profile trial the first, from which on the median regret stays within a share.

    Args:
        courses: of the seeds.
        share: the regret to come within.
        budget: trials of each search. If these are not enough, the answer is one more.
    """
    for trials in range(budget, 0, -1):
        if median(course.after_trials(trials) for course in courses) > share:
            return trials + 1
    return 1


def growth_of(
    plain: Sequence[Course], whole: Sequence[Course], share: float, budget: int, bar: float = 1.5, draws: int = _DRAWS
) -> Growth:
    """Returns the growth over some seeds.

    Args:
        plain: courses without switches, one of each seed.
        whole: courses with switches, of the same seeds.
        share: the regret to come within.
        budget: trials of each search.
        bar: the most growth that is allowed.
        draws: of the bootstrap.
    """

    def both(places: Sequence[int]) -> tuple[int, int]:
        few = trials_of_median([plain[place] for place in places], share, budget)
        return few, trials_of_median([whole[place] for place in places], share, budget)

    dice, seeds = random.Random(0), range(len(plain))
    without, with_switches = both(seeds)
    drawn = [both(dice.choices(seeds, k=len(seeds))) for _ in range(draws)]
    factors = [more / few for few, more in drawn]
    return Growth(
        without,
        with_switches,
        round(with_switches / without, 2),
        round(stdev(factors), 2),
        round(fmean(factor > bar for factor in factors), 3),
    )


def figures_of(courses: Sequence[Course], budget: int) -> dict[str, Any]:
    """Returns the figures of a world, with the regrets of each seed after each trial."""
    within = [min(course.trials_within(NEAR), budget + 1) for course in courses]
    return {
        "median_regret_after_trials": {
            str(trials): round(median(course.after_trials(trials) for course in courses), 4)
            for trials in _SHOWN
            if trials <= budget
        },
        "trials_within_of_each_seed": [int(each) for each in within],
        "mean_trials_within": round(fmean(within), 2),
        "error_of_mean": round(stdev(within) / len(within) ** 0.5, 2) if len(within) > 1 else None,
        "out_of_memory": round(fmean(course.out_of_memory for course in courses), 4),
        "worse_than_submitted_after_8": sum(course.after_trials(8) > course.start for course in courses),
        "regrets": [[round(course.start, 4), *(round(each, 4) for each in course.regrets)] for course in courses],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clusters", nargs="+", choices=CLUSTERS, default=list(CLUSTERS))
    parser.add_argument("--seeds", type=int, default=24)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=40, help="budget of a search, the profile trial among them")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    record: dict[str, Any] = {
        "command": "python -m benchmarks.replay.growth " + " ".join(sys.argv[1:]),
        "first_seed": arguments.first_seed,
        "trials": arguments.trials,
        "growth": {},
        "worlds": {},
    }
    with Pool(arguments.processes) as pool:
        for name in arguments.clusters:
            for courses in _courses(pool, name, seeds, arguments.trials):
                # A run that is cut off keeps the seeds that have ended.
                record["seeds"] = len(courses[name])
                record["growth"][name] = vars(growth_of(*courses.values(), NEAR, arguments.trials))
                record["worlds"] |= {world: figures_of(each, arguments.trials) for world, each in courses.items()}
                arguments.results.write_text(json.dumps(record) + "\n", encoding="utf-8")
    Console(width=160).print(_shown(record["growth"], record["worlds"]))


def _courses(pool: Processes, name: str, seeds: Iterable[int], trials: int) -> Iterator[dict[str, list[Course]]]:
    """Yields the courses of a cluster without switches and with them, after each seed."""
    courses: dict[str, list[Course]] = {name: [], name + WHOLE: []}
    tasks = [(world, TABLES, None, METHOD, seed, trials, 1) for seed in seeds for world in courses]
    for world, _, course in pool.imap(course_of, tasks):
        courses[world].append(course)
        if len(courses[name]) == len(courses[name + WHOLE]):
            yield courses


def _shown(grown: dict[str, Any], worlds: dict[str, Any]) -> Table:
    table = Table(title="Trials to within 3 % of the best")
    for column in ("cluster", "without", "with", "growth", "means of seeds", "median regret with, %", "out of memory"):
        table.add_column(column)
    for name, growth in grown.items():
        plain, whole = worlds[name], worlds[name + WHOLE]
        table.add_row(
            name,
            str(growth["without"]),
            str(growth["with_switches"]),
            f"{growth['factor']} ± {growth['error']} ({100 * growth['share_above']:.0f} % above 1.5)",
            " -> ".join(f"{each['mean_trials_within']} ± {each['error_of_mean']}" for each in (plain, whole)),
            ", ".join(f"{100 * each:.1f}" for each in whole["median_regret_after_trials"].values()),
            f"{100 * plain['out_of_memory']:.1f} -> {100 * whole['out_of_memory']:.1f} %",
        )
    return table


if __name__ == "__main__":
    main()
