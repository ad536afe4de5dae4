"""Whether `--max-trials 8` answers worse than the user's own configuration, over many worlds, starts and seeds.

Each course begins at another configuration of the user's: one of the world's that fits, with the switches as typed.
`adaptive` searches with 8 trials. Then a study's own confirmation measures the best few and the user's configuration in
turn, and decides on the answer.
"""

import argparse
import copy
import json
import random
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from multiprocessing import Pool
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.replay.cluster import CLUSTERS
from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import create
from benchmarks.replay.run import ALL_CLUSTERS, TABLES, world_of
from benchmarks.replay.whole_cluster import WHOLE_CLUSTERS
from benchmarks.replay.world import World
from zerotune.trial_lib.deepspeed_config.layout import AUTOTP
from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH, overwrite_deepspeed_config
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.switches import PROGRAM, switches_of
from zerotune.trial_lib.search.base import Search
from zerotune.trial_lib.search.knobs import get_knob
from zerotune.trial_lib.study.confirmation import Confirmation, Contender, ranking

SWITCHED = Path(__file__).parent / "switched_tables"
RESULTS = Path(__file__).parents[1] / "results" / "replay_never_worse.json"
METRIC = "throughput"


@dataclass(frozen=True)
class Answer:
    """The answer of a study of few trials.

    Attributes:
        searched: the true throughput of the search's answer, relative to that of the user's configuration.
        confirmed: the same of the confirmed answer. It is 1 if the answer is the user's configuration.
    """

    searched: float
    confirmed: float


class _Trials:
    """The trials of a replay as a study has them: with numbers, and named by their configurations."""

    def __init__(self, search: Search, world: World) -> None:
        self._world, self.told = world, dict[int, tuple[Candidate, TrialResult]]()
        self._tell, self._observe = search.tell, search.observe
        search.tell, search.observe = self._told, self._observed  # type: ignore[method-assign]

    def _told(self, candidate: Candidate, result: TrialResult) -> None:
        self._tell(candidate, self._noted(candidate, result))

    def _observed(self, candidate: Candidate, result: TrialResult) -> None:
        self._observe(candidate, self._noted(candidate, result))

    def _noted(self, candidate: Candidate, result: TrialResult) -> TrialResult:
        noted = replace(result, number=len(self.told), config_hash=_key(candidate))
        self.told[noted.number] = candidate, noted
        return noted

    def contenders(self, expected: Mapping[int, float]) -> list[Contender]:
        """Returns the profile trial, the trial of the user's configuration, and those of the search."""
        base = self._world.problem.base_config
        return [
            Contender(candidate, candidate.complete(dict(base)), result, expected.get(number))
            for number, (candidate, result) in self.told.items()
        ]


def answer_of(world: World, seed: int, trials: int) -> Answer:
    """Returns the answer of a study in a world, whose user has the world's submitted configuration.

    Args:
        world: where it searches.
        seed: of its draws and of the noise.
        trials: its budget, the profile trial among them.
    """
    search = create("adaptive", world, seed, trials)
    noted = _Trials(search, world)
    replay = simulate(search, world, seed, stops_hopeless=True)
    own = world.truth(world.submitted)
    assert own is not None
    searched = replay.trials[-1].reported if replay.trials else world.submitted
    seconds = replay.trials[-1].ended_at if replay.trials else 0.0
    confirmed = _confirmed(world, noted.contenders(search.expected()), seed, seconds)
    return Answer((world.truth(searched) or 0.0) / own, (world.truth(confirmed) or 0.0) / own)


def _confirmed(world: World, contenders: list[Contender], seed: int, seconds: float) -> Candidate:
    _, own, *searched = contenders
    # The tables' throughput is by processor time already.
    confirmation = Confirmation(own, ranking(searched, own, METRIC), METRIC, seconds)
    ran: dict[int, Candidate] = {}
    while (candidate := confirmation.next) is not None:
        number = 1000 + len(ran)
        result = world.run(candidate, random.Random(f"{seed}:confirm:{number}"))
        ran[number] = candidate
        confirmation.tell(replace(result, number=number, config_hash=_key(candidate)))
    winner = confirmation.finding().winner
    return own.candidate if winner is None else ran[winner.trials[0]]


def _key(candidate: Candidate) -> str:
    return f"{candidate.family} {candidate.micro_batch_size}"


def started_anywhere(world: World, seed: int) -> World:
    """Returns a world whose user has another configuration, drawn among those that fit with the switches as typed."""
    base, draws = world.problem.base_config, random.Random(f"{seed}:start")
    typed, group = switches_of(base), get_knob(base, AUTOTP, 1)
    coarse = world.problem.space.coarse_switches
    arms = [
        arm
        for arm in world.problem.space.arms
        if all(switches_of(arm.knobs).get(place) == typed.get(place) for place in coarse)
        and get_knob(arm.knobs, AUTOTP, group) == group
    ]
    while True:
        arm = draws.choice(arms)
        started = world.candidate(arm.family(draws.randrange(arm.size)), draws.choice(world.grid))
        if world.truth(started) is not None:
            break
    config = overwrite_deepspeed_config(dict(base), started.knobs)
    own = {**config, MICRO_BATCH: started.micro_batch_size}
    if typed:
        own[PROGRAM] = {**typed, **switches_of(started.knobs)}
    other = copy.copy(world)
    other.submitted, other.problem = started, replace(world.problem, base_config=own)
    return other


def _course(task: tuple[str, int, int]) -> tuple[str, Answer]:
    name, seed, trials = task
    folder = TABLES if (TABLES / f"{name}.jsonl").exists() else SWITCHED
    world = world_of(name, folder, seed)
    # A third of the users have the world's own configuration.
    return name, answer_of(world if seed % 3 == 0 else started_anywhere(world, seed), seed, trials)


def figures_of(answers: list[Answer]) -> dict[str, Any]:
    """Returns the figures of some courses."""
    worse = [each.confirmed for each in answers if each.confirmed < 1.0]
    return {
        "courses": len(answers),
        "worse_before_confirmation": sum(each.searched < 1.0 for each in answers),
        "worse": len(worse),
        "least": round(min(each.confirmed for each in answers), 4),
        "answered_with_own": sum(each.confirmed == 1.0 for each in answers),
        "median_gain": round(median(each.confirmed for each in answers), 3),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--table-seeds", type=int, default=60)
    parser.add_argument("--cluster-seeds", type=int, default=24)
    parser.add_argument("--trials", type=int, default=8)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--worlds", nargs="+", help="names of tables and clusters; by default all")
    parser.add_argument("--results", type=Path, default=RESULTS)
    arguments = parser.parse_args()

    tables = [path.stem for folder in (TABLES, SWITCHED) for path in sorted(folder.glob("*.jsonl"))]
    names = arguments.worlds or [*tables, *CLUSTERS, *WHOLE_CLUSTERS]
    tasks = [
        (name, seed, arguments.trials)
        for name in names
        for seed in range(arguments.cluster_seeds if name in ALL_CLUSTERS else arguments.table_seeds)
    ]
    answers: dict[str, list[Answer]] = {}
    with Pool(arguments.processes) as pool:
        for name, answer in pool.imap(_course, tasks):
            answers.setdefault(name, []).append(answer)
    worlds = {name: figures_of(each) for name, each in answers.items()}
    together = figures_of([answer for each in answers.values() for answer in each])
    record = {
        "command": "python -m benchmarks.replay.never_worse " + " ".join(sys.argv[1:]),
        "trials": arguments.trials,
        "all": together,
        "worlds": worlds,
        "worse": {
            name: [asdict(each) for each in of_world if each.confirmed < 1.0] for name, of_world in answers.items()
        },
    }
    arguments.results.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    for name, figures in {**worlds, "all": together}.items():
        print(f"{name}: {figures}")


if __name__ == "__main__":
    main()
