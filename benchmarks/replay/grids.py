"""Searches on whole grids of real GPUs: `python -m benchmarks.replay.grids`. A launch is what somebody launched.

A world is one model, one number of devices, one global batch and one length of samples. Its candidates are the
configurations that were launched, and each ends as it did. A study there has no profile trial: `adaptive` begins with
the plan of a Megatron-like program (`megatron.py`), or with formulas alone. The others are random order, and the order
of the least model parallelism.
"""

import argparse
import gzip
import json
import random
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from itertools import chain
from multiprocessing import Pool
from pathlib import Path
from statistics import NormalDist, fmean, median
from typing import Any

from benchmarks.replay.megatron import Launch
from benchmarks.replay.world import World
from zerotune.trial_lib.deepspeed_config.layout import LAYOUTS, PROGRAM
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, overwrite_deepspeed_config
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.messages.turned import CHECKPOINTING
from zerotune.trial_lib.plan.evaluation import SAFE
from zerotune.trial_lib.plan.fits import PROGRAM_ERROR
from zerotune.trial_lib.plan.plan_record import LIKELY
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.adaptive import AdaptiveSearch
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine
from zerotune.trial_lib.search.base import ExpectedArm, SearchProblem, key_of
from zerotune.trial_lib.search.cost_model import Point
from zerotune.trial_lib.search.knobs import Arm, SearchSpace
from zerotune.trial_lib.search.methods import AdaptiveSettings

GRIDS = Path(__file__).parent / "tables" / "grids.jsonl.gz"
RESULTS = Path(__file__).parents[1] / "results" / "replay_grids.json"
BUDGETS = (5, 10, 20)
_DRAWS = 200  # random orders
_WIDE = 1.645  # deviations to either end of a 90 % interval
# A world with fewer launches leaves nothing to search.
_FEWEST = 20
# The program's switches: the options of a launch, by their places.
_TENSOR, _PIPELINE, _SEQUENCE, _KERNEL = "--tensor", "--pipeline", "--sequence-parallel", "--kernel"
_NEEDED = ("params", "layers", "hidden", "heads", "ffn", "vocab", "seq_len", "micro_batch", "grad_accum", "gpus")

Place = tuple[int, int]
"""An arm's number and a micro-batch size."""


class GridWorld(World):
    """The launches of one grid."""

    noise = 0.0  # each was launched once

    def __init__(self, rows: Sequence[Mapping[str, Any]], is_planned: bool = True) -> None:
        first = rows[0]
        self.name = f"{first['model'].split(' (')[0]}, {first['gpus']} devices, {first['seq_len']} tokens"
        arms = {_text(_knobs(row)): _knobs(row) for row in rows}
        space = SearchSpace.of_arms(Arm(knobs, ()) for knobs in arms.values())
        places = {_text(arm.knobs): place for place, arm in enumerate(space.arms)}
        self.launches: dict[Place, Launch] = {}
        for row in rows:
            self.launches.setdefault((places[_text(_knobs(row))], row["micro_batch"]), Launch(row))
        self.largest_size = max(size for _, size in self.launches)
        self.problem = self._problem(first, space)
        self.submitted = self.candidate(space.arms[0].knobs, 1)
        # What its code refuses is in no plan.
        self.offered = {place: each for place, each in self.launches.items() if each.is_possible or not is_planned}
        if is_planned:
            self._plan()

    def _problem(self, row: Mapping[str, Any], space: SearchSpace) -> SearchProblem:
        typed = Launch({**row, "micro_batch": 1, "grad_accum": 1})
        self._outside = typed.outside.mean
        profile = ModelProfile(
            num_params=row["params"],
            trainable_num_params=row["params"],
            linear_params=row["params"],
            activation_mem_per_gpu=int(typed.activations),
            gpu_mem=int(typed.cluster.device.memory - self._outside),
            data_parallel_size=typed.replicas,
            flops_per_sample=6.0 * row["params"] * row["seq_len"],
            layer_count=row["layers"],
        )
        base = {
            MICRO_BATCH: 1,
            ACCUMULATION: 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            **_knobs(row),
            LAYOUTS: {_TENSOR: "tensor", _PIPELINE: "pipeline"},
        }
        return SearchProblem(space, profile, base, row["gpus"], "cuda", train_batch_size=_batch(row))

    def _plan(self) -> None:
        # Gives searches the plan's bytes and speeds of each arm.
        foreseen, expected = list[ForeseenArm](), list[ExpectedArm]()
        switches = self.problem.space.coarse_switches
        for place, arm in enumerate(self.problem.space.arms):
            sizes = [size for of_arm, size in self.launches if of_arm == place]
            launches = {size: self.launches[place, size] for size in sizes}
            possible = {size: each for size, each in launches.items() if each.is_possible} or launches
            # Arms have other groups of ranks. What those take beyond the room of the typed ones counts as states.
            needed = {size: each.needed + each.outside.mean - self._outside for size, each in possible.items()}
            states = min(each.states for each in possible.values())
            kept = SizeLine.near({size: its - states for size, its in needed.items()})
            config = overwrite_deepspeed_config(self.problem.base_config, arm.knobs)
            foreseen.append(
                ForeseenArm(ds_config=config, initialize=SizeLine(states), backward=kept, update=SizeLine(0.0))
            )
            # As a plan says it: the speeds of what fits, and the fastest that surely does. What surely has no room is
            # not tried.
            speeds = {size: launches[size].samples_per_s for size in sizes if self.is_planned_to_fit((place, size))}
            surely = [size for size in speeds if self.chance((place, size)) >= SAFE]
            fastest = max(surely or speeds, key=speeds.__getitem__, default=min(sizes))
            if min(needed.values()) * (1 - _WIDE * PROGRAM_ERROR) > self.problem.profile.gpu_mem:
                self.offered = {each: of_it for each, of_it in self.offered.items() if each[0] != place}
            expected.append(
                ExpectedArm(
                    key=key_of(arm, self.problem.base_config, switches),
                    label=arm.label,
                    micro_batch=fastest,
                    samples_per_s=speeds.get(fastest, 0.0),
                    apart=launches[fastest].step.apart,
                    switches=switches,
                    speeds=speeds,
                )
            )
        surely = [
            place for place, _ in enumerate(expected) if self.chance((place, expected[place].micro_batch)) >= SAFE
        ]
        best = max(surely or range(len(expected)), key=lambda place: expected[place].samples_per_s)
        expected[best] = replace(expected[best], is_first=True)
        self.problem = replace(self.problem, foreseen=tuple(foreseen), expected=tuple(expected))

    def chance(self, place: Place) -> float:
        """Returns the foreseen probability that a launch has room."""
        launch = self.launches[place]
        needed = launch.needed + launch.outside.mean - self._outside
        found = NormalDist(needed, PROGRAM_ERROR * needed).cdf(self.problem.profile.gpu_mem)
        return found if launch.is_possible else 0.0

    def is_planned_to_fit(self, place: Place) -> bool:
        return self.chance(place) >= LIKELY

    @property
    def grid(self) -> Sequence[int]:
        return sorted({size for _, size in self.launches})

    def place_of(self, candidate: Candidate) -> Place:
        found = self.problem.space.locate(candidate.knobs)
        assert found is not None, "a candidate of the space"
        return found[0], candidate.micro_batch_size

    def speed(self, place: Place) -> float | None:
        """Returns the samples/s of a launch; None if it failed."""
        row = self.launches[place].row
        if row["outcome"] != "completed":
            return None
        return float(row.get("samples_per_s") or _batch(row) / row["step_time_s"])

    def truth(self, candidate: Candidate) -> float | None:
        return self.speed(self.place_of(candidate))

    @cached_property
    def best(self) -> float:
        return max(speed for place in self.launches if (speed := self.speed(place)) is not None)

    def run(self, candidate: Candidate, draws: random.Random) -> TrialResult:
        place = self.place_of(candidate)
        speed = self.speed(place)
        if speed is None:
            return self.out_of_memory(candidate, {})
        launch, room = self.launches[place], self.problem.profile.gpu_mem
        peak = launch.row.get("peak_memory_gib")
        states = int(launch.states)
        memory = Memory()
        if peak:
            memory = Memory(peak=[int(peak * 2**30)], after_initialize=[states], available=[room - states])
        step = _batch(launch.row) / speed
        return self.completed(candidate, speed, [step] * 3, memory, {"steps": 3 * step})


class _AmongLaunches(AdaptiveSearch):
    """`adaptive`, which asks for nothing that was not launched."""

    def __init__(self, settings: AdaptiveSettings, world: GridWorld) -> None:
        super().__init__(settings, world.problem)
        self._launches = world.offered

    def _untried(self, points: Iterable[Point]) -> list[Point]:
        return [point for point in super()._untried(points) if (point.arm, point.size) in self._launches]


def read_worlds(path: Path) -> dict[tuple[Any, ...], list[dict[str, Any]]]:
    """Returns the rows of each world that has enough of them to search."""
    plain = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    rows = [json.loads(line) for line in plain.splitlines()]
    worlds: dict[tuple[Any, ...], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if all(row.get(name) for name in _NEEDED) and not row.get("expert_parallel") and not row.get("peft"):
            worlds[row["model"], row["gpus"], row["seq_len"], _batch(row)].append(row)
    return {
        key: rows
        for key, rows in worlds.items()
        if len(rows) >= _FEWEST and any(row["outcome"] == "completed" for row in rows)
    }


def _batch(row: Mapping[str, Any]) -> int:
    replicas = row["gpus"] // (row["tensor_parallel"] * row["pipeline_parallel"])
    return int(row["micro_batch"] * row["grad_accum"] * replicas)


def _text(knobs: Mapping[str, Any]) -> str:
    return json.dumps(knobs, sort_keys=True)


def _knobs(row: Mapping[str, Any]) -> dict[str, Any]:
    switches = {_TENSOR: row["tensor_parallel"], _PIPELINE: row["pipeline_parallel"]}
    switches[CHECKPOINTING] = "full" if row["activation_checkpointing"] else "none"
    switches |= {_KERNEL: row.get("kernel"), _SEQUENCE: bool(row.get("megatron_sequence_parallel"))}
    return {"zero_optimization": {"stage": row["zero_stage"]}, PROGRAM: switches}


# Orders of launches: each returns the places that it launches, in order.


def by_adaptive(world: GridWorld, launches: int) -> list[Place]:
    settings = AdaptiveSettings(
        max_trials=launches + 1,
        zero_stages=world.problem.space.stages,
        metric="throughput",
        seed=0,
        max_micro_batch=world.largest_size,
        memory_headroom=0.0,
    )
    search, order = _AmongLaunches(settings, world), list[Place]()
    while (asked := search.ask()) is not None:
        assert isinstance(asked, Candidate), "these problems have no sweeps"
        order.append(world.place_of(asked))
        search.tell(asked, world.run(asked, random.Random(0)))
    return order


def in_random_order(world: GridWorld, seed: int) -> list[Place]:
    places = list(world.launches)
    random.Random(f"{seed}:{world.name}").shuffle(places)
    return places


def by_least_parallelism(world: GridWorld) -> list[Place]:
    def parallelism(place: Place) -> tuple[int, ...]:
        launch = world.launches[place]
        return launch.tensor * launch.stages, launch.stages, -launch.row["zero_stage"], place[1]

    return sorted(world.launches, key=parallelism)


def by_plan_alone(world: GridWorld) -> list[Place]:
    return sorted(
        world.launches, key=lambda place: (not world.is_planned_to_fit(place), -world.launches[place].samples_per_s)
    )


def figures_of(world: GridWorld, orders: Sequence[Sequence[Place]]) -> dict[str, Any]:
    """Returns medians over the orders: the regret after so many launches, and the share of launches that failed."""
    regrets: dict[str, float] = {}
    failed: dict[str, float] = {}
    for launches in BUDGETS:
        speeds = [[world.speed(place) or 0.0 for place in order[:launches]] for order in orders]
        regrets[str(launches)] = round(median(1 - max(each, default=0.0) / world.best for each in speeds), 4)
        failed[str(launches)] = round(fmean(each.count(0.0) / max(1, len(each)) for each in speeds), 4)
    return {"regret": regrets, "failed": failed, "launches": median(min(max(BUDGETS), len(order)) for order in orders)}


def judged(rows: Sequence[Mapping[str, Any]]) -> tuple[str, dict[str, Any]]:
    planned, plain = GridWorld(rows), GridWorld(rows, is_planned=False)
    most = max(BUDGETS)
    methods: dict[str, Callable[[], list[list[Place]]]] = {
        "adaptive with the plan": lambda: [by_adaptive(planned, most)],
        "adaptive with formulas": lambda: [by_adaptive(plain, most)],
        "the plan's order": lambda: [by_plan_alone(planned)],
        "least parallelism": lambda: [by_least_parallelism(planned)],
        "random": lambda: [in_random_order(planned, seed) for seed in range(_DRAWS)],
    }
    fits = [(planned.is_planned_to_fit(place), planned.speed(place) is not None) for place in planned.launches]
    return planned.name, {
        "launches": len(planned.launches),
        "failed": sum(not ran for _, ran in fits),
        "said_to_fit": [sum(said and ran for said, ran in fits), sum(said for said, _ in fits)],
        "said_not_to_fit": [sum(not said and not ran for said, ran in fits), sum(not said for said, _ in fits)],
        "methods": {name: figures_of(planned, orders()) for name, orders in methods.items()},
    }


def told_apart(rows: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    """Returns how many launches failed by code that refuses them, not for memory, and perhaps for it.

    Memory is no reason if one that needs at least as much ran: with as many samples or more at a time, and with states
    divided over as many ranks or fewer.
    """
    ran = defaultdict(list)
    for row in rows:
        if row["outcome"] == "completed":
            ran[_kind(row)].append(row)
    found = dict.fromkeys(("of code", "not of memory", "perhaps of memory", "perhaps of memory, foreseen"), 0)
    for row in rows:
        if row["outcome"] == "completed":
            continue
        launch = Launch(row)
        if not launch.is_possible:
            found["of code"] += 1
        elif any(_needs_as_much(other, row) for other in ran[_kind(row)]):
            found["not of memory"] += 1
        else:
            found["perhaps of memory"] += 1
            found["perhaps of memory, foreseen"] += launch.needed + launch.outside.mean > launch.cluster.device.memory
    return found


def _kind(row: Mapping[str, Any]) -> tuple[Any, ...]:
    names = ("model", "seq_len", "tensor_parallel", "pipeline_parallel", "activation_checkpointing", "kernel")
    return (*map(row.get, names), bool(row.get("megatron_sequence_parallel")))


def _needs_as_much(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    mine, its = Launch(one), Launch(other)
    divides_less = one["zero_stage"] == 0 or (other["zero_stage"] == 1 and mine.replicas <= its.replicas)
    # Of one replica no gradients are copied, and fewer micro-batches than stages are on their way.
    as_many = min(mine.stages, mine.accumulation) >= min(its.stages, its.accumulation)
    return (
        one["micro_batch"] >= other["micro_batch"]
        and divides_less
        and as_many
        and (mine.replicas > 1) >= (its.replicas > 1)
    )


def median_mean_worst(values: Sequence[float]) -> list[float]:
    return [round(median(values), 4), round(fmean(values), 4), round(max(values), 4)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=Path, default=GRIDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    worlds: dict[str, dict[str, Any]] = {}
    with Pool(arguments.processes) as pool:
        for name, figures in pool.imap(judged, read_worlds(arguments.rows).values(), chunksize=1):
            worlds[name] = figures
            print(name, figures["launches"], "failed", figures["failed"])
            for method, each in figures["methods"].items():
                shown = "  ".join(f"{100 * regret:5.1f}" for regret in each["regret"].values())
                print(f"    {method:24s} {shown}   failed {100 * each['failed']['10']:3.0f} %", flush=True)
    record = {
        "command": "python -m benchmarks.replay.grids " + " ".join(sys.argv[1:]),
        "worlds": worlds,
        "all_worlds": {
            method: {
                what: {
                    str(n): median_mean_worst([each["methods"][method][what][str(n)] for each in worlds.values()])
                    for n in BUDGETS
                }
                for what in ("regret", "failed")
            }
            for method in next(iter(worlds.values()))["methods"]
        },
        "failures": told_apart(list(chain.from_iterable(read_worlds(arguments.rows).values()))),
        "said_to_fit": [sum(each["said_to_fit"][place] for each in worlds.values()) for place in (0, 1)],
        "said_not_to_fit": [sum(each["said_not_to_fit"][place] for each in worlds.values()) for place in (0, 1)],
    }
    print(json.dumps({name: record[name] for name in ("all_worlds", "failures", "said_to_fit", "said_not_to_fit")}))
    arguments.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
