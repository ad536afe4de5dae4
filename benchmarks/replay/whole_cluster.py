"""The cluster model with the program's switches: recomputation, compilation, attention, a data loader's workers.

What the switches do, by public figures:

* Recomputation: bytes by Korthikanti et al. (arXiv 2205.05198, equations 1 and 2), and another forward pass of the
  recomputed layers, a third of the work (Chen et al., arXiv 1604.06174).
* Compilation: 6,667 tokens/s for 5,762, and 77.0 GiB for 82.4, of Llama 3.1 8B on 8 H100 (torchtitan,
  docs/performance.md, December 2024). 16 % at 128 devices too.
* Attention as written keeps 5 a s^2 bytes a layer and sample (2205.05198, equation 1), and reads and writes them. A
  fused kernel does not (Dao et al., arXiv 2205.14135).
* No published figure of loaders was found. So the share of a step that the program as typed waits is drawn from 0 to
  30 %, which is an assumption. Each worker takes its part of the wait.

How far each is off these figures is drawn for each seed, by 5 % for a value, and 1 % for a value in an arm. Searches
know none of it.
"""

import json
import random
from bisect import bisect_left
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import Any

from benchmarks.replay.cluster import CLUSTERS, ClusterWorld, zero_of
from benchmarks.replay.cluster_model import Cluster, Transformer, Zero
from zerotune.trial_lib.messages.turned import ATTENTION, CHECKPOINTING, COMPILE, FUSED, WORKERS
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.records.switches import PROGRAM, switches_of
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace, set_knob

WHOLE = " whole"
"""The end of such a world's name."""
WHOLE_CLUSTERS = {name + WHOLE: cluster for name, cluster in CLUSTERS.items()}

_RECOMPUTED = {"none": 0.0, "every_second": 0.5, "full": 1.0}
_COMPILED_SPEED, _COMPILED_BYTES = 6667 / 5762, 77.0 / 82.4
_COMPILES_S = 60.0  # an assumption: some minutes of Inductor's for a large model, most of it cached
_HEAD = 128  # width of an attention head
_MEMORY_BANDWIDTH = 1.3e12  # bytes/s, as for the optimizer's states
_MOST_WAIT, _LEAST_SHARE = 0.3, 0.03
_LARGEST = 12  # sizes of a family that may be its best
_NEAR = 0.8  # of the best, where the best guess of an arm may be if the arm has the best
_FUSED_SHARE = 0.5  # an assumption: the part of the optimizer's time that one kernel for all parameters saves


class WholeClusterWorld(ClusterWorld):
    """A cluster whose program has switches too."""

    def __init__(self, name: str, cluster: Cluster, seed: int = 0) -> None:
        """Draws what is off the formulas."""
        super().__init__(name.removesuffix(WHOLE), cluster, seed)
        model = cluster.model
        self.name = name
        # The typed program, which the formulas of the base class have as it is.
        self._typed = {
            CHECKPOINTING: "full" if model.recompute else "none",
            COMPILE: False,
            ATTENTION: "sdpa",
        }
        wait = random.Random(f"{seed}:{name}:wait").uniform(0, _MOST_WAIT)
        self._wait = wait if wait >= _LEAST_SHARE else 0.0
        typed = {**self._typed, FUSED: False, **({WORKERS: 0} if self._wait else {})}
        base = {**self.problem.base_config, PROGRAM: typed}
        space = SearchSpace.of_arms(self._arms(self.problem.space.arms))
        self.problem = replace(self.problem, space=space, base_config=base)
        plain = {"zero_optimization": {"stage": 3}, PROGRAM: self._typed}
        arm = next(each for each in space.arms if each.knobs == plain)
        own = {f"{PROGRAM}.{FUSED}": False, **({f"{PROGRAM}.{WORKERS}": 0} if self._wait else {})}
        self.submitted = self.candidate(arm.with_fine(own), 1)

    def _arms(self, plain: tuple[Arm, ...]) -> list[Arm]:
        fine = [Knob(f"{PROGRAM}.{FUSED}", (True, False))]
        if self._wait:
            fine.append(Knob(f"{PROGRAM}.{WORKERS}", (4, 1, 0)))
        return [
            Arm(
                {**arm.knobs, PROGRAM: {CHECKPOINTING: recomputed, COMPILE: compiled, ATTENTION: attention}},
                (*arm.fine, *fine),
            )
            for arm in plain
            for recomputed in sorted(_RECOMPUTED, key=lambda each: each != self._typed[CHECKPOINTING])
            for compiled in (False, True)
            for attention in ("sdpa", "eager")
        ]

    @cached_property
    def best(self) -> float:
        """The throughput of the best candidate. A fused optimizer and enough workers cost nothing in this model."""
        fine = {f"{PROGRAM}.{FUSED}": True, **({f"{PROGRAM}.{WORKERS}": 4} if self._wait else {})}
        plain = {
            place: max(self._values(arm, 0, fine), default=0.0) for place, arm in enumerate(self.problem.space.arms)
        }
        near = [arm for place, arm in enumerate(self.problem.space.arms) if plain[place] > _NEAR * max(plain.values())]
        # A sample's time falls with the size, but for some percent at the largest.
        return max(
            value
            for arm in near
            for index in range(_zero_part(arm).size)
            for value in islice(self._values(arm, index, fine), _LARGEST)
        )

    def _values(self, arm: Arm, index: int, fine: Mapping[str, Any]) -> Iterator[float]:
        """Yields the throughput of a family at all sizes that fit, the largest first."""
        knobs = _zero_part(arm).family(index)
        for path, value in fine.items():
            set_knob(knobs, path, value)

        def truth(size: int) -> float | None:
            return self.truth(self.candidate(knobs, size))

        # The need grows with the size.
        largest = bisect_left(range(1, self.largest_size + 1), True, key=lambda size: truth(size) is None)
        for size in range(largest, 0, -1):
            value = truth(size)
            assert value is not None
            yield value

    # -- by formula ----------------------------------------------------------------------------------------------

    def _seconds(self, candidate: Candidate) -> float:
        switches, zero = switches_of(candidate.knobs), zero_of(candidate.knobs)
        steps = candidate.gradient_accumulation_steps
        size = candidate.micro_batch_size
        compiled = _COMPILED_SPEED if switches[COMPILE] else 1.0
        plain = _of(self._cluster, recompute=False)
        without = plain.step_seconds(zero, size, steps)
        forward = _of(self._cluster, recompute=True).step_seconds(zero, size, steps) - without
        # Compiled kernels compute. What devices send to each other stays.
        compute = 3 * forward + _RECOMPUTED[switches[CHECKPOINTING]] * forward
        compute *= 1 / compiled * self._off_switches(candidate.knobs)
        seconds = max(0.0, without - 3 * forward) + compute
        if switches[ATTENTION] == "eager":
            passes = 6 + 2 * _RECOMPUTED[switches[CHECKPOINTING]]
            seconds += passes * steps * size * _scores_bytes(self._cluster.model) / _MEMORY_BANDWIDTH / compiled
        if switches[FUSED] and not zero.offload_optimizer:
            seconds -= _FUSED_SHARE * self._cluster._optimizer(zero)
        wait = self._wait / (1 - self._wait) * self._typed_sample_seconds * size * steps
        seconds += wait / (1 + switches.get(WORKERS, 0)) if switches.get(WORKERS, 0) < 4 else 0.0
        return seconds * self._off_speed(candidate.knobs["zero_optimization"])

    @property
    def _typed_sample_seconds(self) -> float:
        return self._cluster.step_seconds(Zero(stage=3, overlap=True), 1, 1)

    def _memory(self, candidate: Candidate) -> tuple[float, float]:
        switches = switches_of(candidate.knobs)
        after, need = super()._memory(candidate)
        model, size = self._cluster.model, candidate.micro_batch_size
        by_formula = self._kept_bytes(switches)
        off = self._off("activations", f"{candidate.zero_stage} {json.dumps(self._coarse(switches))}", 0.05)
        arm_off = (need - self._cluster.step_bytes(zero_of(candidate.knobs), 0)) / (size * model.activation_bytes)
        # The base class has counted the activations of the program as typed, with its own factor.
        return after, need + size * (by_formula * off - model.activation_bytes) * max(0.5, min(arm_off, 1.5))

    def _kept_bytes(self, switches: Mapping[str, Any]) -> float:
        """Returns the bytes that a sample keeps for the backward pass (2205.05198, equations 1 and 2)."""
        model, share = self._cluster.model, _RECOMPUTED[switches[CHECKPOINTING]]
        layer = 34 * model.sequence * model.hidden * (_COMPILED_BYTES if switches[COMPILE] else 1.0)
        if switches[ATTENTION] == "eager":
            layer += _scores_bytes(model) / model.layers
        kept = (1 - share) * model.layers + (1 if share else 0)
        return kept * layer + share * model.layers * 2 * model.sequence * model.hidden

    # -- what is off the formulas --------------------------------------------------------------------------------

    def _off_switches(self, knobs: Mapping[str, Any]) -> float:
        factor, zero = 1.0, knobs["zero_optimization"]
        arm = f"{zero['stage']}{'offload_optimizer' in zero}"
        for place, value in switches_of(knobs).items():
            if place in self._typed and value != self._typed[place]:
                factor *= self._off("switch", f"{place} {value}", 0.05)
                factor *= self._off("switch", f"{place} {value} {arm}", 0.01)
        return factor

    def _coarse(self, switches: Mapping[str, Any]) -> dict[str, Any]:
        return {place: switches[place] for place in self._typed}

    def run(self, candidate: Candidate, draws: random.Random) -> TrialResult:
        """Returns how a trial would end. A compiled program's first step takes longer."""
        result = super().run(candidate, draws)
        if not switches_of(candidate.knobs)[COMPILE]:
            return result
        phases = {**result.phases, "first_step": result.phases["first_step"] + _COMPILES_S}
        return replace(result, phases=phases)


def _of(cluster: Cluster, recompute: bool) -> Cluster:
    return replace(cluster, model=replace(cluster.model, recompute=recompute))


def _zero_part(arm: Arm) -> Arm:
    return Arm(arm.knobs, tuple(knob for knob in arm.fine if not knob.path.startswith(PROGRAM)))


def _scores_bytes(model: Transformer) -> float:
    """Returns the bytes of all layers' attention scores of a sample: 5 a s^2 a layer."""
    return 5 * (model.hidden / _HEAD) * model.sequence**2 * model.layers
