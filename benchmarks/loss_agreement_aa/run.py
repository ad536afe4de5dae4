"""Compares how two configurations train small models: with a planted fault, or alike. Counts the wrong verdicts.

With `--cut` the candidates cut the batch otherwise, and so does the trial of the user's configuration in other
rounding, as in a study whose profile has not shown that the loss is computed row by row.
"""

import argparse
import json
import platform
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.loss_agreement_aa.engines import FAULTS, RANKS, SAMPLES, Case, run
from benchmarks.loss_agreement_aa.models import MODELS
from zerotune.trial_lib.messages.measurement import WeightChange
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import Outcome, TrialResult
from zerotune.trial_lib.study.confirmation import cuts_apart
from zerotune.trial_lib.study.loss_agreement import LossCourse, compare
from zerotune.trial_lib.study.weight_changes import FirstUpdates, roundoff

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "loss_agreement_aa.json"
ROUNDS = 2  # the fewest of a confirmation that was cut short
NUMBERS = ("fp32", "bf16", "fp16")
# What changes from the user's configuration (stage 1, micro-batch 4, accumulation 2) in a pair that has to agree.
# In fp16 at stage 0 DeepSpeed 0.19 does not scale the loss for an optimizer of torch's, and still divides the gradients
# by the scale (`FP16_UnfusedOptimizer` has no `loss_scaler`). That pair is no pair that has to agree.
STAGE_0: dict[str, Any] = {"stage": 0}
# With another cut of the trial in other rounding: candidates with that cut, with yours, and with a third
CUT_WAYS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(("alike", {"stage": stage}) for stage in (1, 2, 3)),
    *(("alike, cut as you do", {"stage": stage, "micro_batch": 4}) for stage in (2, 3)),
    *(("alike, of a third cut", {"stage": 2, "micro_batch": size}) for size in (1, 8)),
)
_BEYOND = 1.2
_AT_ONCE = 150  # trainings of one process group
WAYS: tuple[dict[str, Any], ...] = (
    STAGE_0,
    {"stage": 2},
    {"stage": 3},
    {"micro_batch": 8},
    {"stage": 2, "micro_batch": 1},
    {"stage": 3, "micro_batch": 2},
    {"offloads": True},
    {"stage": 3, "bucket": 1000, "micro_batch": 8},
)


@dataclass(frozen=True)
class Program:
    """What a user trains."""

    model: str
    optimizer: str
    rate: float
    clips: float = 0.0
    warms_up: bool = False

    def own(self, numbers: str) -> Case:
        more = {"clips": self.clips, "warms_up": self.warms_up}
        return Case(self.model, numbers, self.optimizer, self.rate, stage=1, micro_batch=4, **more)


PROGRAMS = {
    # The comparison was made with these.
    "first": [
        Program("perceptron", "SGD", 0.1),
        Program("decoder", "AdamW", 1e-3),
        Program("decoder with dropout", "AdamW", 1e-3, clips=1.0),
    ],
    # These then showed that frozen weights have to be rounded otherwise too, and how sums in 32 bits differ.
    "second": [
        Program("recurrent", "Adam", 3e-3),
        Program("convolutions", "momentum", 0.02, warms_up=True),
        Program("adapters", "AdamW", 1e-3, clips=0.5),
        Program("mixture", "SGD", 0.3, clips=0.1),
        Program("tied decoder, deep", "AdamW", 2e-4, clips=1.0, warms_up=True),
    ],
    # These showed that in a small module a turned element is rare.
    "third": [
        Program("encoder", "AdamW", 5e-4, clips=1.0),
        Program("residual", "RMSprop", 5e-4),
        Program("autoencoder", "Adam", 2e-3, warms_up=True),
        Program("gated", "momentum", 0.05, clips=1.0),
    ],
    # Nothing was changed after these.
    "fourth": [
        Program("two towers", "AdamW", 1e-3, clips=1.0),
        Program("sets", "NAdam", 1e-3),
        Program("slow mixer", "Adam", 1e-4),
    ],
    # Means over tokens of a micro-batch, for `--cut`. Nothing was changed after these either.
    "masked": [
        Program("masked decoder", "AdamW", 1e-3, clips=1.0),
        Program("masked recurrent", "momentum", 0.05),
        Program("masked mixer", "Adam", 1e-3),
    ],
}
assert {program.model for programs in PROGRAMS.values() for program in programs} == MODELS.keys()


def planted(own: Case) -> list[Case]:
    """The user's configuration at another stage, with each fault that can be planted there."""
    found = []
    for place, fault in enumerate(FAULTS):
        # A stage that lost gradients of a step's accumulation would be one with gradients of its own.
        stage = 2 + place % 2
        # The user's configuration clips as much then, so that the clipping has an effect.
        clips = 0.1 if fault == "clipped by shard" else own.clips
        found.append(replace(own, fault=fault, stage=stage, clips=clips))
    return found


def alike(own: Case) -> list[Case]:
    return [replace(own, **way) for way in WAYS if (own.numbers, way) != ("fp16", STAGE_0)]


def over_rounds(case: Case) -> list[Case]:
    return [replace(case, data_seed=number) for number in range(ROUNDS)]


def in_other_rounding(own: Case, cut: int | None) -> Case:
    return replace(over_rounds(own)[1], rounding=roundoff(own.config(), ()), micro_batch=cut or own.micro_batch)


def result_of(record: dict[str, Any], case: Case) -> TrialResult:
    change = record["weight_change"]
    given = {key: record[key] for key in ("losses", "skipped_steps", "initial_weights", "gradient_norms")}
    return TrialResult(
        trial_id="", number=0, purpose=Purpose.CONFIRM, config_hash=str(case.micro_batch), outcome=Outcome.COMPLETED,
        weight_change=None if change is None else WeightChange(**change), rounding=case.rounding,
        micro_batch_arrived=case.micro_batch, **given,
    )  # fmt: skip


def course_of(results: Sequence[TrialResult], case: Case) -> LossCourse:
    candidate = Candidate(
        knobs={"zero_optimization": {"stage": case.stage}},
        micro_batch_size=case.micro_batch,
        gradient_accumulation_steps=SAMPLES // case.micro_batch,
        slots=RANKS,
        data_parallel_size=RANKS,
    )
    losses, weights = [each.losses for each in results], [each.initial_weights for each in results]
    skipped, updates = [each.skipped_steps for each in results], [FirstUpdates.of(each) for each in results]
    return LossCourse(candidate, case.config(), losses, weights, skipped=skipped, updates=updates)


def judged(records: dict[Case, dict[str, Any]], own: Case, other: Case, cut: int | None) -> dict[str, Any]:
    """The verdict on one pair."""

    def results(case: Case) -> list[TrialResult]:
        return [result_of(records[each], each) for each in over_rounds(case)]

    changed = {key: value for key, value in asdict(other).items() if value != asdict(own)[key]}
    pair = {"model": own.model, "optimizer": own.optimizer, "numbers": own.numbers, "changed": changed}
    failed = [error for each in over_rounds(other) if (error := records[each].get("error"))]
    if failed:
        return {**pair, "did_not_run": failed[0]}
    # A fault may need a clipping that the user's configuration then has too.
    again = in_other_rounding(own, cut)
    mine = results(own)
    pair_again = (mine[1], result_of(records[again], again))
    courses = course_of(mine, own), course_of(results(other), other)
    reach = cuts_apart(courses[0].candidate, Candidate(micro_batch_size=again.micro_batch))
    # As `Confirmation` does: what the trial in other rounding does not reach is judged without it.
    is_reached = cut is None or cuts_apart(courses[0].candidate, courses[1].candidate) <= reach
    agreement = compare(*courses, pair_again if is_reached else None)
    return {**pair, **agreement.model_dump()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--programs", nargs="*", choices=list(PROGRAMS), default=[*PROGRAMS][:-1])
    parser.add_argument("--numbers", nargs="*", choices=NUMBERS, default=NUMBERS)
    parser.add_argument("--cut", type=int, help="the micro-batch of candidates and of the trial in other rounding")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--records", type=Path, required=True, help="keeps the trainings here, and goes on from them")
    arguments = parser.parse_args()
    pairs: list[tuple[str, str, Case, Case]] = []
    for kind in arguments.programs:
        for program in PROGRAMS[kind]:
            for numbers in arguments.numbers:
                own = program.own(numbers)
                cut = arguments.cut
                for other in planted(own):
                    faulty = replace(other, micro_batch=cut or other.micro_batch)
                    pairs.append((kind, "fault", replace(own, clips=other.clips), faulty))
                if numbers == "fp16" and not cut:
                    pairs.append((kind, "fault of DeepSpeed", own, replace(own, **STAGE_0)))
                for what, way in CUT_WAYS if cut else ():
                    pairs.append((kind, what, own, replace(own, **{"micro_batch": cut, **way})))
                for other in () if cut else alike(own):
                    pairs.append((kind, "alike", own, other))
    wanted = [each for _, _, own, other in pairs for case in (own, other) for each in over_rounds(case)]
    wanted += [in_other_rounding(own, arguments.cut) for _, _, own, _ in pairs]
    records = recorded(list(dict.fromkeys(wanted)), arguments.records)
    verdicts = [
        {"programs": kind, "pair": what, **judged(records, own, other, arguments.cut)}
        for kind, what, own, other in pairs
    ]
    # Is a difference seen that is a little larger than the one that is said to be seen?
    larger = [
        (kind, "beyond", own, replace(other, rate=own.rate * (1.0 + _BEYOND * verdict["seen"][0])))
        for (kind, what, own, other), verdict in zip(pairs, verdicts, strict=True)
        if what.startswith("alike") and other == replace(own, stage=2)
        if verdict.get("seen") and verdict["seen"][0] < 1.0
    ]
    wanted += [each for *_, other in larger for each in over_rounds(other)]
    records = recorded(list(dict.fromkeys(wanted)), arguments.records)
    verdicts += [
        {"programs": kind, "pair": what, **judged(records, own, other, arguments.cut)}
        for kind, what, own, other in larger
    ]
    write(verdicts, [records[case] for case in dict.fromkeys(wanted)], arguments.out)


def recorded(cases: list[Case], kept: Path) -> dict[Case, dict[str, Any]]:
    """The records of these trainings."""

    def read() -> dict[Case, dict[str, Any]]:
        lines = kept.read_text().splitlines() if kept.exists() else []
        return {Case(**each["case"]): each for each in map(json.loads, lines)}

    found = read()
    missing = [case for case in cases if case not in found]
    for start in range(0, len(missing), _AT_ONCE):
        run(missing[start : start + _AT_ONCE], kept)
    return read()


def write(verdicts: list[dict[str, Any]], records: list[dict[str, Any]], out: Path) -> None:
    """Counts, prints and writes."""
    judged_ = [each for each in verdicts if "did_not_run" not in each]
    counts: dict[str, Any] = {}
    for kind in dict.fromkeys(each["programs"] for each in judged_):
        for numbers in NUMBERS:
            for what in dict.fromkeys(each["pair"] for each in judged_):
                wrong = not what.startswith("alike")
                of = [
                    each
                    for each in judged_
                    if (each["programs"], each["numbers"], each["pair"]) == (kind, numbers, what)
                ]
                counts[f"{kind} programs, {numbers}, {what}"] = {
                    "pairs": len(of),
                    "wrong": sum(each["agrees"] is wrong for each in of),
                }
    wrong_ones = [each for each in judged_ if each["agrees"] is not each["pair"].startswith("alike")]
    seconds = [each["weight_change"]["seconds"] for each in records if each.get("weight_change")]
    report = {
        "command": " ".join(["python -m benchmarks.loss_agreement_aa.run", *sys.argv[1:]]),
        "machine": platform.processor() or platform.machine(),
        "trainings": len(records),
        "faults": {
            "pairs": sum(each["pair"] == "fault" for each in judged_),
            "missed": sum(each["agrees"] for each in judged_ if each["pair"] == "fault"),
            "missed_by_fault": Counter(each["changed"]["fault"] for each in wrong_ones if each["pair"] == "fault"),
        },
        "alike": {
            "pairs": sum(each["pair"].startswith("alike") for each in judged_),
            "turned_away": sum(not each["agrees"] for each in judged_ if each["pair"].startswith("alike")),
        },
        "beyond_what_is_said_to_be_seen": {
            "pairs": sum(each["pair"] == "beyond" for each in judged_),
            "missed": sum(each["agrees"] for each in judged_ if each["pair"] == "beyond"),
        },
        "seen": {
            numbers: {
                "all weights": median(whole for whole, _ in seen),
                "one module": median(module for _, module in seen),
            }
            for numbers in NUMBERS
            if (seen := [each["seen"] for each in judged_ if each["numbers"] == numbers and each["seen"]])
        },
        "counts": counts,
        "seconds_of_a_trial": {"median": median(seconds), "largest": max(seconds)} if seconds else {},
        "wrong": wrong_ones,
        "did_not_run": [each for each in verdicts if "did_not_run" in each],
        "each": judged_,
    }
    out.write_text(json.dumps(report, indent=1) + "\n")
    for key in (
        "trainings",
        "faults",
        "alike",
        "beyond_what_is_said_to_be_seen",
        "seen",
        "counts",
        "seconds_of_a_trial",
    ):
        print(key, json.dumps(report[key]))
    for each in report["wrong"]:
        print("WRONG", json.dumps({key: each[key] for key in ("model", "numbers", "changed", "sentence")}))
    for each in report["did_not_run"]:
        print("DID NOT RUN", json.dumps(each)[:300])


if __name__ == "__main__":
    main()
