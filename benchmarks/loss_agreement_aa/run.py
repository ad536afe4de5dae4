"""Compares the losses of two ways to run one training, over programs and ways; counts those that are turned away."""

import argparse
import itertools
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.programs.commands import OWN, REDUCTIONS, Program, others
from benchmarks.programs.trials import trials_of
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.study.loss_agreement import LossCourse, compare

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "loss_agreement_aa.json"
# The stage, and by how much the micro-batch is divided (the accumulation is multiplied), as a power of two.
WAYS = ((1, 0), (0, 0), (2, -1), (3, 0), (1, 1), (3, -1))


def courses_of(program: Program, work: Path) -> dict[str, LossCourse | str]:
    """Returns how a program trains in each way, by its name; why not, where it does not."""
    found = dict[str, LossCourse | str]()
    with trials_of(program, program.copy(work)) as trials:
        profile, own = trials.profile, trials.own
        if own is None:
            return {"as typed": profile.reason or "its batch is not known"}
        varies = profile.program is not None and profile.program.batch_varies
        for stage, power in WAYS:
            if varies and power:
                continue
            micro, odd = divmod(own.micro_batch_size * 2 ** max(0, -power), 2 ** max(0, power))
            accumulation, odd_too = divmod(own.gradient_accumulation_steps * 2 ** max(0, power), 2 ** max(0, -power))
            if odd or odd_too or not micro or not accumulation:
                continue
            candidate = Candidate(
                knobs={"zero_optimization": {"stage": stage}},
                micro_batch_size=micro,
                gradient_accumulation_steps=accumulation,
                slots=own.slots,
                data_parallel_size=own.data_parallel_size,
            )
            result = trials.measured(candidate)
            config = candidate.complete(trials.driver.known.base_config)
            found[f"z{stage}, {micro} x {accumulation}"] = result.reason
            if result.outcome is Outcome.COMPLETED:
                # A way that had no effect would be compared with itself.
                assert config["zero_optimization"]["stage"] == stage
                assert varies or result.micro_batch_arrived == micro
                course = LossCourse(candidate, config, [result.losses], [result.initial_weights])
                found[f"z{stage}, {micro} x {accumulation}"] = course
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=8, help="of each program, at most")
    arguments = parser.parse_args()
    pairs: list[dict[str, Any]] = []
    courses: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for program in [*OWN, *REDUCTIONS, *others()]:
        name = program.name
        with tempfile.TemporaryDirectory(prefix="loss-agreement-") as work:
            found = courses_of(program, Path(work))
        measured = {way: course for way, course in found.items() if isinstance(course, LossCourse)}
        courses += [
            {"program": name, "way": way, "losses": course.losses[0], "initial_weights": course.weights[0]}
            for way, course in measured.items()
        ]
        left_out += [{"program": name, "way": way, "why": why} for way, why in found.items() if isinstance(why, str)]
        for one, other in itertools.islice(itertools.combinations(measured, 2), arguments.pairs):
            agreement = compare(measured[one], measured[other])
            pairs.append({"program": name, "own": one, "candidate": other, **agreement.model_dump()})
        print(name, len(measured), "ways,", len(pairs), "pairs", flush=True)
        write(pairs, courses, left_out)


def write(pairs: list[dict[str, Any]], courses: list[dict[str, Any]], left_out: list[dict[str, str]]) -> None:
    """Writes what was found so far."""
    report = {
        "machine": platform.processor() or platform.machine(),
        "pairs": len(pairs),
        "trainings": len(courses),
        "turned_away": sum(not pair["agrees"] for pair in pairs),
        "not_compared": sum(not pair["is_compared"] for pair in pairs),
        "programs": sorted({pair["program"] for pair in pairs}),
        "did_not_run": left_out,
        "each": pairs,
        "courses": courses,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
