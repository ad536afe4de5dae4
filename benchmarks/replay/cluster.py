"""The cluster model as a world: up to 1,024 devices, with what no formula of a search knows.

What an arm needs and how fast it, each value of its knobs and each combination of them are is off the formulas by
factors drawn once; and every trial has noise.
"""

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil
from typing import Any

from benchmarks.replay.cluster_model import DEVICE_BYTES, Cluster, Transformer, Zero
from benchmarks.replay.world import World
from zerotune.trial_lib.deepspeed_config.overrides import ACCUMULATION, MICRO_BATCH, overwrite_deepspeed_config
from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.search.allocations import ForeseenArm, SizeLine
from zerotune.trial_lib.search.base import ExpectedArm, SearchProblem, key_of
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace

CLUSTERS = {
    "1.3B on 8": Cluster(8, Transformer(layers=24, hidden=2048, sequence=2048, recompute=False)),
    "13B on 64": Cluster(64, Transformer(layers=40, hidden=5120, sequence=2048, recompute=True)),
    "70B on 1024": Cluster(1024, Transformer(layers=80, hidden=8192, sequence=4096, recompute=True)),
}
CONTEXT_BYTES = 2e9  # what CUDA and NCCL take of a device before there is an engine
_WINDOW = StepWindow()  # where steps vary by 2 % its least number is enough
# A first step takes a constant and little more than another one: by medians over the sizes of the recorded tables 1.07
# to 1.20 of it. The constant, hundredths of a second there, is an assumption: communicators, kernels, the allocator.
_FIRST_STEP_S, FIRST_STEP_SHARE = 5.0, 1.2
# A plan is off the formulas in the memory and the speed of each arm, with these spreads. Plans are some 6 and 15 % off
# public measurements (benchmarks/foresee/public_gpus). A part of that is the same for all arms, and changes no order.
_PLAN_MEMORY, _PLAN_SPEED = 0.06, 0.1
_ZERO = "zero_optimization"
_HOST = {"device": "cpu", "pin_memory": True}


class ClusterWorld(World):
    """A cluster whose searches are not told the formulas."""

    def __init__(self, name: str, cluster: Cluster, seed: int = 0, noise: float = 0.02, largest_size: int = 64) -> None:
        """Draws what is off the formulas.

        Args:
            name: for people.
            cluster: devices and model.
            seed: of what is off.
            noise: relative standard deviation of a trial's throughput.
            largest_size: micro-batch sizes (samples) above it are not tried.
        """
        self.name, self.noise, self.largest_size = name, noise, largest_size
        self._cluster, self._seed = cluster, seed
        self._factors: dict[str, float] = {}
        model = cluster.model
        base = {
            MICRO_BATCH: 1,
            ACCUMULATION: 1,
            "bf16": {"enabled": True},
            "optimizer": {"type": "AdamW", "params": {"lr": 1e-4}},
            _ZERO: {"stage": 3},
        }
        profile = ModelProfile(
            num_params=model.params,
            trainable_num_params=model.params,
            activation_mem_per_gpu=int(model.activation_bytes),
            gpu_mem=int(DEVICE_BYTES - CONTEXT_BYTES),
            data_parallel_size=cluster.devices,
            flops_per_sample=model.flops,
        )
        self.problem = SearchProblem(_space(model.params), profile, base, cluster.devices, "cuda", can_sweep=True)
        self.submitted = self.candidate(self._plain_arm(3).family(0), 1)

    def plan(self) -> None:
        """Gives searches a plan: each arm's bytes and speed by the formulas, off by factors drawn once."""
        arms = self.problem.space.arms
        planned = [self._planned(arm) for arm in arms]
        best = max(range(len(arms)), key=lambda place: planned[place][1].samples_per_s)
        expected = tuple(replace(arm, is_first=place == best) for place, (_, arm) in enumerate(planned))
        self.problem = replace(self.problem, foreseen=tuple(arm for arm, _ in planned), expected=expected)

    def _planned(self, arm: Arm) -> tuple[ForeseenArm, ExpectedArm]:
        """Returns an arm's bytes, and its speed at the largest micro-batch that fits by them."""
        knobs = arm.family(0)
        zero, name = zero_of(knobs), _arm_name(knobs[_ZERO])
        off = self._off("planned bytes", name, _PLAN_MEMORY)
        constant, sample = (self._cluster.step_bytes(zero, size) * off for size in (0, 1))
        initialized = self._cluster.initialized_bytes(zero)
        room = DEVICE_BYTES - CONTEXT_BYTES - initialized - constant
        size = max(1, min(self.largest_size, int(room / (sample - constant))))
        off = self._off("planned speed", name, _PLAN_SPEED)
        # As a plan times them: some of those that fit, the largest among them.
        sizes = [*(each for each in self.grid if each < size), size][-1:-8:-2]
        speeds = {
            each: each * self._cluster.devices / (self._cluster.step_seconds(zero, each, 1) * off) for each in sizes
        }
        base = self.problem.base_config
        foreseen = ForeseenArm(
            ds_config=overwrite_deepspeed_config(base, knobs),
            initialize=SizeLine(initialized),
            backward=SizeLine(constant, sample - constant),
            update=SizeLine(constant),
        )
        if room <= 0:
            return foreseen, ExpectedArm(key=key_of(arm, base), label=name)
        speed = speeds[size]
        return foreseen, ExpectedArm(
            key=key_of(arm, base),
            label=name,
            micro_batch=size,
            samples_per_s=speed,
            speeds=speeds,
        )

    @property
    def grid(self) -> Sequence[int]:
        """The powers of two."""
        return [2**power for power in range(self.largest_size.bit_length())]

    def run(self, candidate: Candidate, draws: random.Random) -> TrialResult:
        """Returns how a trial would end, after as many steps as one makes."""
        truth = self.truth(candidate)
        start_up = self._start_up(candidate)
        if truth is None:
            return self.out_of_memory(candidate, {**start_up, "first_step": _FIRST_STEP_S, "end": 5.0})
        throughput = truth * draws.lognormvariate(0, self.noise)
        step = self._seconds(candidate)
        steps = [draws.lognormvariate(0, self.noise) for _ in range(_WINDOW.min_steps)]
        after, need = self._memory(candidate)
        need *= draws.lognormvariate(0, 0.005)
        memory = Memory(
            peak=[int(after + need)],
            after_initialize=[int(after)],
            available=[int(DEVICE_BYTES - CONTEXT_BYTES - after)],
        )
        first = _FIRST_STEP_S + FIRST_STEP_SHARE * step
        phases = {**start_up, "first_step": first, "steps": (_WINDOW.end_step - 1) * step, "end": 5.0}
        return self.completed(candidate, throughput, steps, memory, phases)

    def truth(self, candidate: Candidate) -> float | None:
        """Returns the throughput by the formulas and what is off them; None where the memory is not enough."""
        after, need = self._memory(candidate)
        if after + need > DEVICE_BYTES - CONTEXT_BYTES:
            return None
        samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps * self._cluster.devices
        return samples / self._seconds(candidate)

    def _seconds(self, candidate: Candidate) -> float:
        by_formula = self._cluster.step_seconds(
            zero_of(candidate.knobs), candidate.micro_batch_size, candidate.gradient_accumulation_steps
        )
        return by_formula * self._off_speed(candidate.knobs[_ZERO])

    def _memory(self, candidate: Candidate) -> tuple[float, float]:
        """Returns the bytes after initialisation, and those that the steps take above that."""
        zero = zero_of(candidate.knobs)
        arm = _arm_name(candidate.knobs[_ZERO])
        constant = self._cluster.step_bytes(zero, 0)
        activations = self._cluster.step_bytes(zero, candidate.micro_batch_size) - constant
        workspace = 1e9 * self._off("workspace", arm, 0.5)
        need = constant * self._off("buffers", arm, 0.1) + activations * self._off("activations", arm, 0.15) + workspace
        return self._cluster.initialized_bytes(zero), need

    def _off_speed(self, zero: Mapping[str, Any]) -> float:
        arm = _arm_name(zero)
        factor = self._off("arm", arm, 0.03) * self._off("lineage", json.dumps(zero, sort_keys=True), 0.005)
        for key, value in zero.items():
            factor *= self._off("value", f"{arm} {key} {value}", 0.01)
        return factor

    def _off(self, what: str, of: str, spread: float) -> float:
        """Returns a lognormal factor, always the same for the same thing."""
        key = f"{self._seed}:{self.name}:{what}:{of}"
        if key not in self._factors:
            self._factors[key] = random.Random(key).lognormvariate(0, spread)
        return self._factors[key]

    def _start_up(self, candidate: Candidate) -> dict[str, float]:
        """Returns the seconds before the first step: launching on all nodes, importing, building and partitioning."""
        billions = self._cluster.model.params / 1e9
        build = 8 + 1.5 * billions + (2 * billions if candidate.zero_stage == 3 else 0.5 * billions)
        return {"start": 10 + 0.2 * self._cluster.nodes, "import": 15.0, "initialize": build}

    def _plain_arm(self, stage: int) -> Arm:
        return next(arm for arm in self.problem.space.arms if arm.stage == stage and len(arm.knobs[_ZERO]) == 1)


def _arm_name(zero: Mapping[str, Any]) -> str:
    return f"{zero['stage']}{'offload_optimizer' in zero}"


def zero_of(knobs: Mapping[str, Any]) -> Zero:
    """Returns the settings that the model knows."""
    zero = knobs[_ZERO]
    return Zero(
        stage=zero["stage"],
        offload_optimizer="offload_optimizer" in zero,
        overlap=zero.get("overlap_comm", False),
        reduce_bucket=zero.get("reduce_bucket_size", 5e8),
        allgather_bucket=zero.get("allgather_bucket_size", 5e8),
        prefetch_bucket=zero.get("stage3_prefetch_bucket_size", 5e7),
        persistence=zero.get("stage3_param_persistence_threshold", 1e5),
        max_live=zero.get("stage3_max_live_parameters", 1e9),
    )


def _space(params: int) -> SearchSpace:
    buckets = tuple(dict.fromkeys(min(int(size), 2 * ceil(params / 2)) for size in (5e8, 5e7, 2e8, 1e9)))
    fine: dict[int, tuple[Knob, ...]] = {
        0: (),
        1: _knobs(overlap_comm=(False, True), reduce_bucket_size=buckets, allgather_bucket_size=buckets),
        2: _knobs(overlap_comm=(False, True), reduce_bucket_size=buckets, allgather_bucket_size=buckets),
        3: _knobs(
            overlap_comm=(True, False),
            reduce_bucket_size=buckets,
            stage3_prefetch_bucket_size=(50_000_000, 0, 500_000_000),
            stage3_param_persistence_threshold=(100_000, 0),
            stage3_max_live_parameters=(1_000_000_000, 100_000_000, 3_000_000_000),
        ),
    }
    plain = [Arm({_ZERO: {"stage": stage}}, fine[stage]) for stage in fine]
    offloading = [Arm({_ZERO: {"stage": stage, "offload_optimizer": _HOST}}, fine[stage]) for stage in (1, 2, 3)]
    return SearchSpace.of_arms([*plain, *offloading])


def _knobs(**values: tuple[Any, ...]) -> tuple[Knob, ...]:
    return tuple(Knob(f"{_ZERO}.{key}", options) for key, options in values.items())
