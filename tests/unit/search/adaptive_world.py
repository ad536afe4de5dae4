"""A model whose trials take no time, for the adaptive search: arms with a speed and a memory of their own."""

import random
from dataclasses import dataclass, field

from zerotune.trial_lib.messages.measurement import Memory, ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep, Withdrawal
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.adaptive import AdaptiveSearch
from zerotune.trial_lib.search.base import SearchProblem
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace, get_knob
from zerotune.trial_lib.search.methods import AdaptiveSettings

MB = 2**20
PROFILE = ModelProfile(
    num_params=1_000_000,
    trainable_num_params=1_000_000,
    activation_mem_per_gpu=8 * MB,
    gpu_mem=1000 * MB,
    data_parallel_size=2,
    flops_per_sample=1e9,
)
BUCKET, OVERLAP = "zero_optimization.reduce_bucket_size", "zero_optimization.overlap_comm"
FINE = (Knob(BUCKET, (500_000, 250_000, 1_000_000)), Knob(OVERLAP, (False, True)))
SPACE = SearchSpace.of_arms(
    [
        Arm({"zero_optimization": {"stage": 0}}),
        *(Arm({"zero_optimization": {"stage": stage}}, FINE) for stage in (1, 2, 3)),
        Arm({"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}}}, FINE),
    ]
)


def problem(**changes) -> SearchProblem:
    arguments = {
        "space": SPACE,
        "profile": PROFILE,
        "base_config": {"train_micro_batch_size_per_gpu": 4, "optimizer": {"type": "AdamW"}},
        "slots": 2,
        **changes,
    }
    return SearchProblem(**arguments)


def adaptive(problem_=None, **settings) -> AdaptiveSearch:
    return AdaptiveSearch(AdaptiveSettings(**{"metric": "throughput", **settings}), problem_ or problem())


def ended(outcome, candidate=None, **more) -> TrialResult:
    return TrialResult(
        trial_id="study-1", number=1, purpose=Purpose.SEARCH, config_hash="0" * 16, outcome=outcome, **more
    )


@dataclass
class SimulatedModel:
    """Runs a candidate: a sample costs less in larger batches, each arm and some knobs have a speed.

    Attributes:
        memory: MB that a trial may take above initialisation.
        per_sample: MB that a sample takes.
        noise: relative standard deviation of a measurement.
        speed: factor on the throughput by stage.
    """

    memory: int = 900
    per_sample: float = 12.0
    noise: float = 0.01
    speed: dict[int, float] = field(default_factory=lambda: {0: 0.8, 1: 1.0, 2: 1.05, 3: 0.7})

    def need(self, candidate: Candidate) -> float:
        buckets = get_knob(candidate.knobs, BUCKET, 0) / 1e6
        return 80 + self.per_sample * candidate.micro_batch_size + 20 * buckets

    def throughput(self, candidate: Candidate) -> float:
        size, steps = candidate.micro_batch_size, candidate.gradient_accumulation_steps
        speed = self.speed[candidate.zero_stage]
        if get_knob(candidate.knobs, "zero_optimization.offload_optimizer.device"):
            speed *= 0.6
        if get_knob(candidate.knobs, OVERLAP):
            speed *= 1.08
        return 1000 * speed / (1 + 6 / size + 4 / (size * steps))

    def run(self, candidate: Candidate) -> TrialResult:
        if self.need(candidate) > self.memory:
            return ended(Outcome.OUT_OF_MEMORY)
        draws = random.Random(f"{candidate.family}:{candidate.micro_batch_size}")
        value = self.throughput(candidate) * (1 + draws.gauss(0, self.noise))
        samples = candidate.micro_batch_size * candidate.gradient_accumulation_steps * 2
        need = int(self.need(candidate) * MB)
        return ended(
            Outcome.COMPLETED,
            metrics={"throughput": value, "latency": samples / value, "step": 0.1 * samples / value},
            memory=Memory(peak=[need] * 2, after_initialize=[0, 0], available=[self.memory * MB] * 2),
        )


def drive(search, run, concurrency=1, order=None, foresees=lambda candidate: True):
    """Runs a search to its end; returns what happened, in order: (what, candidate or sweep, result or reason)."""
    order = order or random.Random(0)
    groups: list[list[Candidate]] = []
    history = []
    while not search.finished:
        while len(groups) < concurrency and (asked := search.ask()) is not None:
            groups.append(list(asked.candidates) if isinstance(asked, Sweep) else [asked])
            history.append(("ask", asked, None))
        if search.finished:
            break
        group = groups[order.randrange(len(groups))]
        candidate = group.pop(0)
        result = run(candidate)
        search.tell(candidate, result)
        history.append(("tell", candidate, result))
        stopped = result.outcome is not Outcome.COMPLETED
        if group and (stopped or not foresees(group[0])):
            reason = Withdrawal.ENDED if stopped else Withdrawal.MEMORY
            for left in group:
                search.withdraw(left, reason)
                history.append(("withdraw", left, reason))
            group.clear()
        groups = [each for each in groups if each]
    return history


def repeat(search, history):
    """Takes a search through a recorded history."""
    for what, asked, outcome in history:
        if what == "ask":
            search.apply(asked)
        elif what == "tell":
            search.tell(asked, outcome)
        else:
            search.withdraw(asked, outcome)
    return search


def trials(history):
    return [(candidate, result) for what, candidate, result in history if what == "tell"]
