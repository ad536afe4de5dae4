"""Replays every method on recorded tables and on the cluster model, and writes how far each stays below the best."""

import argparse
import json
import platform
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import cache, lru_cache
from math import inf, isinf
from multiprocessing import Pool
from pathlib import Path
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.replay.all_worlds import Overall, clock_seconds, overall
from benchmarks.replay.cluster import CLUSTERS, ClusterWorld
from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import METHODS, OWN, create
from benchmarks.replay.recorded import read_table
from benchmarks.replay.regret import Course
from benchmarks.replay.stopping import replay_stopping
from benchmarks.replay.surfaces import SURFACES, SurfaceWorld
from benchmarks.replay.table import TableWorld
from benchmarks.replay.whole_cluster import WHOLE_CLUSTERS, WholeClusterWorld
from benchmarks.replay.world import World
from zerotune.trial_lib.search.allocations import ForeseenArm

TABLES = Path(__file__).parent / "tables"
RESULTS = Path(__file__).parents[1] / "results" / "replay.json"
BUDGETS = (5, 10, 20, 40)
CLOCK = "asha"  # its median time for so many trials is the budget in time
NEAR = 0.03
ALL_CLUSTERS = (*CLUSTERS, *WHOLE_CLUSTERS)
DRAWN = (*ALL_CLUSTERS, *SURFACES)


def world_of(name: str, tables: Path, seed: int, foreseen: Path | None = None) -> World:
    """Returns a world; each seed has a cluster of its own, since one might suit a method by accident.

    Args:
        name: of a table or a cluster.
        tables: the folder of the tables.
        seed: of a cluster.
        foreseen: the folder with the foreseen arms of the tables; None for searches without them. A cluster of
            ZeRO alone has a plan then.
    """
    if name in DRAWN:
        return cluster_of(name, seed, foreseen is not None)
    return table_of(tables / f"{name}.jsonl", None if foreseen is None else foreseen / f"{name}.json")


@cache
def table_of(path: Path, foreseen: Path | None) -> TableWorld:
    world = TableWorld.read(path)
    if foreseen is not None:
        arms = tuple(ForeseenArm.from_json(arm) for arm in json.loads(foreseen.read_text()))
        world.problem = replace(world.problem, foreseen=arms)
    return world


@lru_cache(maxsize=1)
def cluster_of(name: str, seed: int, is_planned: bool) -> ClusterWorld:
    if name in SURFACES:
        return SurfaceWorld(name, seed)
    if name in WHOLE_CLUSTERS:
        return WholeClusterWorld(name, WHOLE_CLUSTERS[name], seed)
    world = ClusterWorld(name, CLUSTERS[name], seed)
    if is_planned:
        world.plan()
    return world


def course_of(task: tuple[str, Path, Path | None, str, int, int, int]) -> tuple[str, str, Course]:
    name, tables, foreseen, method, seed, trials, concurrency = task
    world = world_of(name, tables, seed, foreseen)
    search = create(method, world, seed, trials, concurrency)
    # dsat's searches take a trial that was stopped for one that has failed: a study spares theirs.
    stops = method in OWN and OWN[method].ends_hopeless_trials
    replay = simulate(search, world, seed, concurrency, stops_hopeless=stops)
    return name, method, Course.of(replay, world)


def spread(values: Iterable[float]) -> dict[str, float | None]:
    """Returns median and quartiles; None for one that is infinite."""
    values = list(values)
    finite = [value if not isinf(value) else sys.float_info.max for value in values]
    low, _, high = quantiles(finite, n=4, method="inclusive") if len(values) > 1 else finite * 3
    figures = {"median": median(finite), "q25": low, "q75": high}
    return {name: round(value, 4) if value < 1e300 else None for name, value in figures.items()}


def figures_of(courses: Sequence[Course], budgets_s: Sequence[float]) -> dict[str, Any]:
    """Returns a method's figures in one world."""
    trials = [len(course.regrets) for course in courses]
    failed = sum(course.out_of_memory * count for course, count in zip(courses, trials, strict=True))
    within = [course.seconds_within(NEAR) for course in courses]
    return {
        "regret_after_trials": {str(n): spread(course.after_trials(n) for course in courses) for n in BUDGETS},
        "regret_after_time": {
            str(n): spread(course.after_seconds(seconds) for course in courses)
            for n, seconds in zip(BUDGETS, budgets_s, strict=True)
        },
        "seconds_within_3_percent": spread(within),
        "came_within_3_percent": fmean(seconds < inf for seconds in within),
        "share_out_of_memory": round(failed / max(1, sum(trials)), 4),
        "trials_within_3_percent": spread(course.trials_within(NEAR) for course in courses),
        "trials": spread(float(count + 1) for count in trials),
        "mean_regret_after_trials": {
            str(n): round(fmean(course.after_trials(n) for course in courses), 4) for n in BUDGETS
        },
    }


def show(name: str, record: dict[str, Any]) -> Table:
    table = Table(title=f"{name}: {record['share_that_fails']:.0%} of the grid fails, noise {record['noise']:.1%}")
    columns = [f"{n} trials" for n in BUDGETS] + [f"{seconds:.0f} s" for seconds in record["budgets_s"]]
    for column in ("regret after", *columns, "within 3 %: s", "came", "out of memory", "trials"):
        table.add_column(column, justify="right")

    def percent(regrets: dict[str, Any]) -> list[str]:
        return [f"{regrets[str(n)]['median']:.1%}" for n in BUDGETS]

    for method, figures in record["methods"].items():
        within = figures["seconds_within_3_percent"]["median"]
        table.add_row(
            method,
            *percent(figures["regret_after_trials"]),
            *percent(figures["regret_after_time"]),
            "-" if within is None else f"{within:.0f}",
            f"{figures['came_within_3_percent']:.0%}",
            f"{figures['share_out_of_memory']:.1%}",
            f"{figures['trials']['median']:.0f}",
        )
    return table


def show_overall(methods: Mapping[str, Overall], most_trials: int) -> Table:
    table = Table(title=f"all worlds: the mean of the medians, and the worst of them; time in trials of {CLOCK}")
    columns = [f"{n} {unit}" for unit in ("trials", "trials' time") for n in BUDGETS]
    for column in ("regret after", *columns, "within 3 %"):
        table.add_column(column, justify="right")
    for method, figures in methods.items():
        means = [*figures.after_trials.values(), *figures.after_time.values()]
        worst = [*figures.worst_after_trials.values(), *figures.worst_after_time.values()]
        within = f"> {most_trials}" if figures.trials_within is None else str(figures.trials_within)
        table.add_row(method, *(f"{a:.1%} ({b:.1%})" for a, b in zip(means, worst, strict=True)), within)
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=60)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--trials", type=int, default=120, help="budget of a search, the profile trial among them")
    parser.add_argument("--concurrency", type=int, default=1)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    parser.add_argument(
        "--worlds",
        nargs="+",
        help="names of tables, clusters and surfaces; by default all without switches, and no surface",
    )
    parser.add_argument("--tables", type=Path, default=TABLES)
    parser.add_argument("--foreseen", type=Path, help="the tables' foreseen arms; clusters have a plan")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    recorded = sorted(path.stem for path in arguments.tables.glob("*.jsonl"))
    names = arguments.worlds or [*recorded, *CLUSTERS]
    seeds = range(arguments.first_seed, arguments.first_seed + arguments.seeds)
    methods = list(dict.fromkeys([CLOCK, *arguments.methods]))
    tasks = [
        (name, arguments.tables, arguments.foreseen, method, seed, arguments.trials, arguments.concurrency)
        for name in names
        for seed in seeds
        for method in methods
    ]
    courses: dict[str, dict[str, list[Course]]] = {}
    with Pool(arguments.processes) as pool:
        for name, method, course in pool.imap(course_of, tasks, chunksize=len(methods)):
            courses.setdefault(name, {}).setdefault(method, []).append(course)

    console = Console(width=200)
    record: dict[str, Any] = {
        "command": "python -m benchmarks.replay.run " + " ".join(sys.argv[1:]),
        "seeds": arguments.seeds,
        "first_seed": arguments.first_seed,
        "concurrency": arguments.concurrency,
        "python": platform.python_version(),
        "worlds": {},
    }
    for name in names:
        worlds = [world_of(name, arguments.tables, seed) for seed in (seeds if name in DRAWN else seeds[:1])]
        world = worlds[0]
        budgets_s = [clock_seconds(courses, CLOCK, n)[name] for n in BUDGETS]
        record["worlds"][name] = {
            "lineages": sum(arm.size for arm in world.problem.space.arms),
            "grid": list(world.grid),
            "share_that_fails": round(median(each.share_that_fails for each in worlds), 4),
            "noise": round(world.noise, 4),
            "budgets_s": [round(seconds, 1) for seconds in budgets_s],
            "methods": {method: figures_of(courses[name][method], budgets_s) for method in arguments.methods},
        }
        if name in recorded:
            stopping = replay_stopping(read_table(arguments.tables / f"{name}.jsonl"), arguments.seeds)
            record["worlds"][name]["too_slow"] = asdict(stopping)
        console.print(show(name, record["worlds"][name]))
    together = overall(courses, CLOCK, BUDGETS, arguments.trials, NEAR)
    record["all_worlds"] = {method: asdict(together[method]) for method in arguments.methods}
    console.print(show_overall({method: together[method] for method in arguments.methods}, arguments.trials))
    arguments.results.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
