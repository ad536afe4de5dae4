"""A model that trains in no time: a memory limit for each stage and a throughput curve. Drives a search through it."""

import random
from dataclasses import dataclass, field, replace

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import SEARCH_METRICS, Outcome, TrialResult
from zerotune.trial_lib.search.arms import build_space, surroundings_of
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.methods import METHODS

PARAMS = 10_000_000_000
GB = 10**9
PROFILE = ModelProfile(
    num_params=PARAMS,
    trainable_num_params=PARAMS // 100,
    activation_mem_per_gpu=GB,
    gpu_mem=80 * GB,
    data_parallel_size=4,
    flops_per_sample=1e12,
)
SMALL = replace(PROFILE, num_params=400_000, trainable_num_params=400_000)


def search(method, profile=PROFILE, base_config=None, slots=4, **settings) -> Search:
    found = METHODS[method].load()
    told = METHODS[method].settings(**settings)
    catalogue = METHODS[method].has_catalogue
    profiled = replace(result(), profile=profile)
    here = surroundings_of(profiled, base_config or {}, slots, "cuda")
    space = build_space(told.zero_stages, here, (), catalogue=catalogue)
    return found(told, SearchProblem(space, profile, base_config or {}, slots))


def result(outcome=Outcome.COMPLETED, **metrics) -> TrialResult:
    return TrialResult(
        trial_id="study-1", number=1, purpose=Purpose.SEARCH, config_hash="0" * 16, outcome=outcome, metrics=metrics
    )


def ran(value=1.0) -> TrialResult:
    """A completed trial; the search's metric, FLOPS_per_gpu by default, is `value`."""
    return result(**dict.fromkeys(SEARCH_METRICS, value))


def failed(outcome=Outcome.OUT_OF_MEMORY) -> TrialResult:
    return result(outcome)


@dataclass
class Model:
    """Runs a candidate: out of memory above the stage's limit, faster with larger sizes and some knobs.

    Attributes:
        limits: the largest micro-batch size by stage.
        data: the largest for which the data last.
    """

    limits: dict[int, int] = field(default_factory=lambda: {0: 20, 1: 24, 2: 30, 3: 45})
    data: int = 10**9

    def run(self, candidate: Candidate) -> TrialResult:
        size = candidate.micro_batch_size
        if size > self.limits[candidate.zero_stage]:
            return failed()
        if size > self.data:
            return failed(Outcome.OUT_OF_DATA)
        knobs_matter = 1 + int(candidate.family, 16) % 7 / 20
        return ran(knobs_matter * size / (size + 8) * (1.1 - candidate.zero_stage / 10))


def drive(search, run, concurrency=1, order=None, history=None):
    """Runs a search to its end, trials ending in random order; returns its asks and tells, in order."""
    history = [] if history is None else history
    order = order or random.Random(0)
    in_flight = [candidate for call, candidate, _ in history if call == "ask"]
    for call, candidate, _ in history:
        if call == "tell":
            in_flight.remove(candidate)
    history = list(history)
    while not search.finished:
        while len(in_flight) < concurrency and (candidate := search.ask()) is not None:
            in_flight.append(candidate)
            history.append(("ask", candidate, None))
        if search.finished:
            break
        candidate = in_flight.pop(order.randrange(len(in_flight)))
        trial_result = run(candidate)
        search.tell(candidate, trial_result)
        history.append(("tell", candidate, trial_result))
    return history


def replay(search, history):
    for call, candidate, trial_result in history:
        if call == "ask":
            search.apply(candidate)
        else:
            search.tell(candidate, trial_result)
    return search


def asked(history):
    return [candidate for call, candidate, _ in history if call == "ask"]


def told(history):
    return [(candidate, trial_result) for call, candidate, trial_result in history if call == "tell"]


def sizes_by_family(history):
    sizes = {}
    for candidate in asked(history):
        sizes.setdefault(candidate.family, []).append(candidate.micro_batch_size)
    return sizes
