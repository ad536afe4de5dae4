"""What a search costs: the CPU time of each ask and tell over 10,000 trials, and the memory of the process."""

import argparse
import gc
import json
import platform
import random
import resource
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from statistics import median, quantiles
from time import process_time_ns
from typing import Any

from zerotune.trial_lib.messages.measurement import ModelProfile
from zerotune.trial_lib.records.candidate import Candidate, Purpose, Sweep
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.search.adaptive import AdaptiveSearch
from zerotune.trial_lib.search.base import Search, SearchProblem
from zerotune.trial_lib.search.dsat import AshaSearch, BinarySearch, RandomSearch
from zerotune.trial_lib.search.knobs import Arm, Knob, SearchSpace
from zerotune.trial_lib.search.methods import AdaptiveSettings, AshaSettings, BinarySettings, RandomSettings

RESULTS = Path(__file__).parents[1] / "results" / "search_cost.json"
METHODS = {
    "adaptive": (AdaptiveSearch, AdaptiveSettings),
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
    """The space of a model of 7e9 parameters has 640 families; one more knob makes 10,240, more than are in flight."""
    more = Knob("zero_optimization.sub_group_size", tuple(range(1, 17)))
    arms = SearchSpace.for_model((1, 2, 3), PROFILE.num_params).arms
    return SearchSpace.of_arms(Arm(arm.knobs, (*arm.fine, more)) for arm in arms)


def create(method: str, trials: int, in_flight: int) -> Search:
    search_type, settings_type = METHODS[method]
    # adaptive would end when nothing is left to gain; its sweeps take more trials than it is asked for.
    more = {"min_gain": 0.0} if method == "adaptive" else {}
    settings = settings_type(max_trials=2 * trials, concurrency=in_flight, **more)
    problem = SearchProblem(wide_space(), PROFILE, {"bf16": {"enabled": True}}, slots=1, can_sweep=True)
    return search_type(settings, problem)


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
        metrics={"FLOPS_per_gpu": size / (size + 20) + int(candidate.family, 16) % 97 / 970} if fits else {},
    )


def measure(search: Search, trials: int, in_flight_limit: int, ask_every: int) -> dict[str, list[int]]:
    """Drives a search to its end, trials ending in random order; returns CPU nanoseconds of each ask and tell.

    Between the asks, one in `ask_every` trials, it takes candidates as from a record.
    """
    times: dict[str, list[int]] = {"ask": [], "tell": []}
    order = random.Random(0)
    recorded = drawn(order)
    in_flight: list[Candidate] = []
    taken = 0
    while taken < trials or in_flight:
        if taken < trials and len(in_flight) < in_flight_limit:
            if taken % ask_every == 0:
                start = process_time_ns()
                asked = search.ask()
                times["ask"].append(process_time_ns() - start)
            else:
                asked = next(recorded)
                search.apply(asked)
            in_flight += asked.candidates if isinstance(asked, Sweep) else [asked]
            taken += 1
            continue
        place = order.randrange(len(in_flight))
        in_flight[place], in_flight[-1] = in_flight[-1], in_flight[place]
        candidate = in_flight.pop()
        result = run(candidate)
        start = process_time_ns()
        search.tell(candidate, result)
        times["tell"].append(process_time_ns() - start)
    return times


def drawn(draws: random.Random) -> Iterator[Candidate]:
    """Yields candidates of the space, none of them twice."""
    space, seen = wide_space(), set[tuple[str, int]]()
    while True:
        knobs = space.draw(draws.choice(space.stages), draws)
        candidate = Candidate(knobs=knobs, micro_batch_size=draws.randint(1, 400), slots=1, data_parallel_size=1)
        key = candidate.family, candidate.micro_batch_size
        if key not in seen:
            seen.add(key)
            yield candidate


def figures_of(method: str, trials: int, in_flight: int, ask_every: int) -> list[dict[str, Any]]:
    """Returns a row for each call: milliseconds, and the megabytes that the process has grown by at its peak."""
    search = create(method, trials, in_flight)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    gc.disable()  # as timeit does: its pauses are the program's, not the search's
    times = measure(search, trials, in_flight, ask_every)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = []
    for call, nanoseconds in times.items():
        figures = {"median": median(nanoseconds), "p99": quantiles(nanoseconds, n=100)[-1], "max": max(nanoseconds)}
        rows.append(
            {
                "method": method,
                "in_flight": in_flight,
                "call": call,
                "calls": len(nanoseconds),
                **{f"{name}_ms": round(value / 1e6, 4) for name, value in figures.items()},
                "peak_mb": round(peak / 1024, 1),
                "grown_mb": round((peak - before) / 1024, 1),
            }
        )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=10_000)
    parser.add_argument("--in-flight", type=int, default=1_000)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=tuple(METHODS))
    arguments = parser.parse_args()

    rows = []
    for method in arguments.methods:
        # adaptive thinks for as long as a short trial takes: nobody has a thousand of those side by side.
        shape = (8, 50) if method == "adaptive" else (arguments.in_flight, 1)
        # A process each: its peak memory is then the method's.
        with get_context("spawn").Pool(1) as pool:
            rows += pool.apply(figures_of, (method, arguments.trials, *shape))

    print(f"{'method':9}{'call':6}{'calls':>7}{'median ms':>11}{'p99 ms':>9}{'max ms':>9}{'peak MB':>9}{'grown':>8}")
    for row in rows:
        print(
            f"{row['method']:9}{row['call']:6}{row['calls']:7}"
            f"{row['median_ms']:11.4f}{row['p99_ms']:9.4f}{row['max_ms']:9.4f}"
            f"{row['peak_mb']:9.1f}{row['grown_mb']:8.1f}"
        )
    record = {
        "trials": arguments.trials,
        "python": platform.python_version(),
        "machine": platform.machine(),
        "rows": rows,
    }
    RESULTS.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
