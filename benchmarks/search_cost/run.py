"""What a search costs: the CPU time of each ask and tell over 10,000 trials with 1,000 in flight."""

import argparse
import gc
import json
import platform
import random
from pathlib import Path
from statistics import median, quantiles
from time import thread_time_ns

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.knobs import Knob, SearchSpace
from trial_lib.experiment.result import ModelProfile, Outcome, TrialResult
from trial_lib.search.asha import AshaSearch, AshaSettings
from trial_lib.search.base import Search
from trial_lib.search.binary import BinarySearch, BinarySettings
from trial_lib.search.random import RandomSearch, RandomSettings

RESULTS = Path(__file__).parents[1] / "results" / "search_cost.json"
METHODS = {
    "asha": (AshaSearch, AshaSettings),
    "binary": (BinarySearch, BinarySettings),
    "random": (RandomSearch, RandomSettings),
}
GB = 10**9
PROFILE = ModelProfile(
    num_params=7 * GB,
    trainable_num_params=GB // 10,
    activation_mem_per_gpu=GB // 10,
    gpu_mem=80 * GB,
    data_parallel_size=1,
    flops_per_sample=1e12,
)


def wide_space() -> SearchSpace:
    """The space of a model of 7e9 parameters has 640 lineages; one more knob makes 10,240, more than are in flight."""
    more = Knob("zero_optimization.sub_group_size", tuple(range(1, 17)))
    knobs = SearchSpace.for_model((1, 2, 3), PROFILE.num_params).knobs
    return SearchSpace({stage: (*of_stage, more) for stage, of_stage in knobs.items()})


def run(candidate: Candidate) -> TrialResult:
    """A trial that takes no time: its memory ends at 300 samples, its throughput grows with the size."""
    size = candidate.micro_batch_size
    fits = size <= 300
    return TrialResult(
        trial_id="benchmark",
        number=0,
        purpose=Purpose.SEARCH,
        config_hash="",
        outcome=Outcome.COMPLETED if fits else Outcome.OUT_OF_MEMORY,
        metrics={"FLOPS_per_gpu": size / (size + 20) + int(candidate.lineage, 16) % 97 / 970} if fits else {},
    )


def measure(search: Search, in_flight_limit: int) -> dict[str, list[int]]:
    """Drives a search to its end, trials ending in random order; returns CPU nanoseconds of each ask and tell."""
    times: dict[str, list[int]] = {"ask": [], "tell": []}
    order = random.Random(0)
    in_flight: list[Candidate] = []
    while not search.finished:
        while len(in_flight) < in_flight_limit:
            start = thread_time_ns()
            candidate = search.ask()
            took = thread_time_ns() - start
            if candidate is None:
                break
            times["ask"].append(took)
            in_flight.append(candidate)
        place = order.randrange(len(in_flight))
        in_flight[place], in_flight[-1] = in_flight[-1], in_flight[place]
        candidate = in_flight.pop()
        result = run(candidate)
        start = thread_time_ns()
        search.tell(candidate, result)
        times["tell"].append(thread_time_ns() - start)
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=1_000)
    arguments = parser.parse_args()

    gc.disable()  # as timeit does: its pauses are the program's, not the search's
    rows = []
    for method, (search_type, settings_type) in METHODS.items():
        settings = settings_type(max_trials=arguments.trials + 1, concurrency=arguments.in_flight)
        search = search_type(settings, wide_space(), PROFILE, {"bf16": {"enabled": True}}, 1)
        for call, times in measure(search, arguments.in_flight).items():
            figures = {"median": median(times), "p99": quantiles(times, n=100)[-1], "max": max(times)}
            milliseconds = {f"{name}_ms": round(value / 1e6, 4) for name, value in figures.items()}
            rows.append({"method": method, "call": call, "calls": len(times), **milliseconds})

    print(f"{'method':8}{'call':6}{'calls':>7}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}")
    for row in rows:
        print(
            f"{row['method']:8}{row['call']:6}{row['calls']:7}"
            f"{row['median_ms']:11.4f}{row['p99_ms']:9.4f}{row['max_ms']:9.4f}"
        )
    record = {
        "trials": arguments.trials,
        "in_flight": arguments.in_flight,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
