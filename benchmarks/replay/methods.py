"""The searches that are compared, by name: each is given the same problem and the same budget."""

from typing import Any

from benchmarks.replay.deepspeed_rule import DeepSpeedRule
from benchmarks.replay.tpe import TpeSearch
from benchmarks.replay.world import World
from zerotune.trial_lib.search.base import Search
from zerotune.trial_lib.search.methods import METHODS as OWN
from zerotune.trial_lib.search.methods import SearchSettings

METHODS = (*(method.name for method in OWN.values() if method.confirms_winner), "tpe", "deepspeed")


def create(method: str, world: World, seed: int, max_trials: int, concurrency: int = 1) -> Search:
    """Returns a search over a world's problem that has asked for nothing yet.

    Args:
        method: one of `METHODS`.
        world: where it will search.
        seed: of its draws.
        max_trials: the profile trial among them.
        concurrency: trials that may run at once.
    """
    settings: dict[str, Any] = {
        "max_trials": max_trials,
        "zero_stages": world.problem.space.stages,
        "metric": "throughput",
        "seed": seed,
        "concurrency": concurrency,
        "max_micro_batch": world.largest_size,
    }
    if method == "tpe":
        return TpeSearch(SearchSettings(**settings), world.problem, world.largest_size)
    if method == "deepspeed":
        return DeepSpeedRule(SearchSettings(**settings), world.problem, world.largest_size)
    own = OWN[method]
    search: type[Search] = own.load()
    # The others keep no memory free, and what is judged does not ask for it.
    policy = {"memory_headroom": 0.0} if own.has_batch_policy else {}
    return search(own.settings(**settings, **policy), world.problem)
