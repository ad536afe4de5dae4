"""Compares two ways to run one training, over programs as users write them; counts those that are turned away."""

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks.programs.commands import OWN, REDUCTIONS, Program, others
from benchmarks.programs.trials import Trials, trials_of
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.confirmation import cut_otherwise
from zerotune.trial_lib.study.loss_agreement import LossCourse, compare
from zerotune.trial_lib.study.weight_changes import FirstUpdates, roundoff

RESULTS = Path(__file__).resolve().parents[1] / "results" / "loss_agreement_programs.json"
# The stage, and by how much the micro-batch is divided (the accumulation is multiplied), as a power of two.
OWN_WAY = (1, 0)
WAYS = ((0, 0), (2, -1), (3, 0), (1, 1), (3, -1))


def candidate_of(own: Candidate, stage: int, power: int) -> Candidate | None:
    """The user's configuration at a stage and in another cut; None if the batch cannot be cut so."""
    micro, odd = divmod(own.micro_batch_size * 2 ** max(0, -power), 2 ** max(0, power))
    accumulation, odd_too = divmod(own.gradient_accumulation_steps * 2 ** max(0, power), 2 ** max(0, -power))
    if odd or odd_too or not micro or not accumulation:
        return None
    return Candidate(
        knobs={"zero_optimization": {"stage": stage}},
        micro_batch_size=micro,
        gradient_accumulation_steps=accumulation,
        slots=own.slots,
        data_parallel_size=own.data_parallel_size,
    )


def course_of(trials: Trials, candidate: Candidate, result: TrialResult) -> LossCourse:
    config = candidate.complete(trials.driver.known.base_config)
    formats = trials.profile.formats
    more = {"skipped": [result.skipped_steps], "updates": [FirstUpdates.of(result)]}
    return LossCourse(candidate, config, [result.losses], [result.initial_weights], formats, **more)  # type: ignore[arg-type]


def verdicts_of(program: Program, work: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    with trials_of(program, program.copy(work)) as trials:
        if trials.own is None or (candidate := candidate_of(trials.own, *OWN_WAY)) is None:
            return [{"program": program.name, "did_not_run": trials.profile.reason or "its batch is not known"}]
        config = candidate.complete(trials.driver.known.base_config)
        plan = trials.driver.plan_again(Purpose.CONFIRM, candidate)
        mine = trials.run(plan)
        seen = trials.profile.program
        varies = seen is not None and seen.batch_varies
        ways = [None if varies and power else candidate_of(trials.own, stage, power) for stage, power in WAYS]
        others_ = [way for way in ways if way is not None]
        across = None if seen is None or seen.longest_sequence is not None else seen.across_rows
        is_row_wise = across is not None and not (across.kind or across.undecided or across.is_outside)
        cut = candidate if is_row_wise else cut_otherwise(candidate, others_)
        plan = trials.driver.plan_again(Purpose.CONFIRM, cut)
        again = trials.run(replace(plan, rounding=roundoff(config, trials.profile.formats)))
        for other in others_:
            name = f"z{other.zero_stage}, {other.micro_batch_size} x {other.gradient_accumulation_steps}"
            result = trials.measured(other)
            failed = next((each.reason for each in (mine, again, result) if each.outcome is not Outcome.COMPLETED), "")
            if failed:
                found.append({"program": program.name, "way": name, "did_not_run": failed})
                continue
            courses = course_of(trials, candidate, mine), course_of(trials, other, result)
            agreement = compare(*courses, (mine, again))
            by = f"{cut.micro_batch_size} x {cut.gradient_accumulation_steps}"
            found.append({"program": program.name, "way": name, "rounding_by": by, **agreement.model_dump()})
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", help="names of programs")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    for program in [*OWN, *REDUCTIONS, *others()]:
        if arguments.only and program.name not in arguments.only:
            continue
        with tempfile.TemporaryDirectory(prefix="loss-agreement-") as work:
            found += verdicts_of(program, Path(work))
        for each in found:
            if each["program"] == program.name:
                print(json.dumps(each), flush=True)
        compared = [each for each in found if each.get("is_compared")]
        report = {
            "command": "python -m benchmarks.loss_agreement_aa.programs",
            "pairs": len(compared),
            "turned_away": sum(not each["agrees"] for each in compared),
            "with_weights": sum(each["seen"] is not None for each in compared),
            "each": found,
        }
        RESULTS.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
