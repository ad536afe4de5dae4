"""Worlds in which the usual order, or one knob alone, would mislead a search. Arms, knobs and effects are drawn.

The spaces, the memory and the phases are those of the cluster model. The speed is drawn for each seed instead: a cost
of each arm, small effects of all values, and what gives the surface its name.

* `one knob`: an arm is 6 to 20 % behind at its best guess. One value of one of its knobs, there alone, makes it better
  than all others by 5 to 50 %.
* `two knobs`: the same, but only two values together do it. Each of them alone costs some percent.
* `unlike order`: the arms' costs are those that the search expects, in reverse. Stage 3 with offload is best.
* `shuffled order`: the same costs, in any order.
* `nothing to gain`: no value brings more than some tenths of a percent, and the arms are as expected.

Each has a sister with `tight` memory, which has room for few sizes. Readings vary by 2, 5, 7 or 9 %, as on the recorded
tables and the clusters.
"""

import random
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from itertools import product
from math import exp, log
from typing import Any

from benchmarks.replay.cluster import ClusterWorld
from benchmarks.replay.cluster_model import Cluster, Transformer
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.cost_model import prior_costs
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace, get_knob

KINDS = ("one knob", "two knobs", "unlike order", "shuffled order", "nothing to gain")
TIGHT = " tight"
SURFACES = (*KINDS, *(kind + TIGHT for kind in KINDS))
NOISES = (0.02, 0.05, 0.07, 0.09)
# Tokens of a sample: one takes 3.4 to 6.8 GB, or 14 to 20.
_SEQUENCES, _LONG_SEQUENCES = (2048, 4096), (8192, 12288)
_FEWEST_ARMS = 4


class SurfaceWorld(ClusterWorld):
    """A drawn surface."""

    def __init__(self, name: str, seed: int) -> None:
        """Draws the surface of a kind."""
        draws = random.Random(f"{seed}:{name}")
        self._is_tight = name.endswith(TIGHT)
        kind = name.removesuffix(TIGHT)
        sequence = draws.choice(_LONG_SEQUENCES if self._is_tight else _SEQUENCES)
        model = Transformer(layers=24, hidden=2048, sequence=sequence, recompute=False)
        super().__init__(name, Cluster(8, model), seed, noise=draws.choice(NOISES))
        self.problem = replace(self.problem, space=_thinned(self.problem.space, draws))
        self.submitted = self.candidate(self._plain_arm(3).family(0), 1)
        self._draw(kind, draws)

    def _draw(self, kind: str, draws: random.Random) -> None:
        arms = self.problem.space.arms
        usual = prior_costs(arms)
        costs = [cost * draws.uniform(0.6, 1.2) + draws.gauss(0, 0.03) for cost in usual]
        if kind == "unlike order":
            costs = [(max(usual) - cost) * draws.uniform(0.6, 1.2) + draws.gauss(0, 0.03) for cost in usual]
        elif kind == "shuffled order":
            draws.shuffle(costs)
        self._half_size = exp(draws.uniform(log(0.5), log(8.0)))
        spread = 0.002 if kind == "nothing to gain" else draws.uniform(0.002, 0.02)
        self._effects = {
            (place, knob.path, value): abs(draws.gauss(0, spread))
            for place, arm in enumerate(arms)
            for knob in arm.fine
            for value in knob.values[1:]
        }
        # The needle: an arm, and the values that have to be set together. The effect is there and nowhere else.
        self._needle: tuple[int, Mapping[str, Any], float] | None = None
        if kind in ("one knob", "two knobs"):
            count = KINDS.index(kind) + 1
            able = [place for place, arm in enumerate(arms) if len(arm.fine) >= count]
            place = draws.choice(able)
            best = min((each for each in range(len(arms)) if each != place), key=lambda each: costs[each])
            costs[place] = costs[best] - log(1 - draws.uniform(0.06, 0.2))
            knobs = draws.sample(arms[place].fine, count)
            values = {knob.path: draws.choice(knob.values[1:]) for knob in knobs}
            for path, value in values.items() if count > 1 else ():
                self._effects[place, path, value] = draws.uniform(0.03, 0.08)
            lead = draws.choice((1.05, 1.2, 1.5))
            alone = sum(self._effects[place, path, value] for path, value in values.items())
            self._needle = place, values, costs[best] - log(lead) - costs[place] - alone
        self.arm_costs = costs

    def cost(self, place: int, knobs: Mapping[str, Any]) -> float:
        """Returns what a family of an arm costs beside others at the same size, as a logarithm."""
        set_ = {knob.path: get_knob(knobs, knob.path) for knob in self.problem.space.arms[place].fine}
        cost = self.arm_costs[place] + sum(self._effects.get((place, *each), 0.0) for each in set_.items())
        if self._needle is not None and self._needle[0] == place and self._needle[1].items() <= set_.items():
            cost += self._needle[2]
        return cost

    def _seconds(self, candidate: Candidate) -> float:
        found = self.problem.space.locate(candidate.knobs)
        assert found is not None, "a candidate of the space"
        size = candidate.micro_batch_size
        seconds = self._cluster.model.flops * size / 1.5e14 * (1 + self._half_size / size)
        return seconds * candidate.gradient_accumulation_steps * exp(self.cost(found[0], candidate.knobs))

    @cached_property
    def best(self) -> float:
        """The throughput of the best candidate. A sample costs less at larger sizes. Small buckets leave room."""
        return max(
            value
            for arm in self.problem.space.arms
            for positions in product(*(range(len(knob.values)) for knob in arm.fine))
            if (value := self._largest(arm, dict(zip((knob.path for knob in arm.fine), positions, strict=True))))
        )

    def _largest(self, arm: Arm, positions: Mapping[str, int]) -> float:
        # The throughput of a family at the largest size that fits; 0 if none does.
        knobs = arm.with_fine({knob.path: knob.values[positions[knob.path]] for knob in arm.fine})
        size = self.largest_size_of(knobs)
        return self.truth(self.candidate(knobs, size)) or 0.0 if size > 0 else 0.0

    def largest_size_of(self, knobs: Mapping[str, Any]) -> int:
        """Returns the largest micro-batch (samples) that fits; at most 0 if none does. The need is linear in it."""
        (after, one), (_, two) = (self._memory(self.candidate(knobs, size)) for size in (1, 2))
        return int(min(self.largest_size, 1 + (self.problem.profile.gpu_mem - after - one) // (two - one)))


def _thinned(space: SearchSpace, draws: random.Random) -> SearchSpace:
    """Returns a space with some of the arms, the user's among them, some of their knobs, and some values of these."""
    own = next(arm for arm in space.arms if arm.knobs == {"zero_optimization": {"stage": 3}})
    others = draws.sample([arm for arm in space.arms if arm != own], draws.randint(_FEWEST_ARMS, len(space.arms)) - 1)
    kept = draws.uniform(0.4, 0.9)
    arms = []
    for arm in (own, *others):
        fine = []
        for knob in arm.fine:
            if draws.random() < kept or (arm == own and knob in arm.fine[:2]):
                values = draws.sample(knob.values[1:], draws.randint(1, len(knob.values) - 1))
                fine.append(Knob(knob.path, (knob.values[0], *values)))
        arms.append(Arm(arm.knobs, tuple(fine)))
    return SearchSpace.of_arms(arms)
