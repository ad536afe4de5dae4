"""Compares the losses of two ways to run one training, over programs and ways; counts those that are turned away."""

import argparse
import itertools
import json
import platform
import shlex
import shutil
import tempfile
from pathlib import Path
from typing import Any

from trial_lib.experiment.candidate import Candidate, Purpose
from trial_lib.experiment.result import Outcome, TrialResult
from trial_lib.study.arguments import StudyArguments
from trial_lib.study.driver import StudyDriver
from trial_lib.study.loss_agreement import Course, compare
from trial_lib.study.open_study import new_study
from trial_lib.study.runner import Work

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "loss_agreement_aa.json"
PROGRAMS = ROOT / "tests" / "programs"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 1, "reduce_bucket_size": 1_000_000, "allgather_bucket_size": 1_000_000},
}
HALF = {"bf16": {"enabled": True}}
BY_FILE = "deepspeed --num_gpus 2 {} --deepspeed_config aa.json"
TRAINER = (
    "torchrun --nproc_per_node=2 trainer.py --deepspeed ds_auto.json --use_cpu --output_dir out --max_steps 30 "
    "--hidden_size 64 --per_device_train_batch_size 4 --gradient_accumulation_steps 2 --report_to none"
)
# A name, the folder, what is typed there, and what the configuration has besides.
OWN: list[tuple[str, Path, str, dict[str, Any]]] = [
    ("language model", PROGRAMS / "any", BY_FILE.format("raw_json.py"), {}),
    ("language model, bf16", PROGRAMS / "any", BY_FILE.format("raw_json.py"), HALF),
    ("Trainer with dropout", PROGRAMS / "any", TRAINER, {}),
    *(
        (f"reduction {how}", PROGRAMS, f"{BY_FILE.format('own_reduction.py')} --reduction {how}", {})
        for how in ("mean", "sum", "undivided", "divided", "divided_twice")
    ),
    ("reduction sum, bf16", PROGRAMS, f"{BY_FILE.format('own_reduction.py')} --reduction sum", HALF),
    ("two views", PROGRAMS, BY_FILE.format("two_forwards.py"), {}),
    ("zero.Init", PROGRAMS, BY_FILE.format("partitioned_init.py"), {}),
    ("two engines", PROGRAMS, BY_FILE.format("two_engines.py"), {}),
]
# The stage, and by how much the micro-batch is divided (the accumulation is multiplied), as a power of two.
WAYS = ((1, 0), (0, 0), (2, -1), (3, 0), (1, 1), (3, -1))
PAIRS_OF_A_PROGRAM = 8  # so that a hundred are of all of them


def measure(driver: StudyDriver, candidate: Candidate) -> TrialResult:
    """Measures a candidate in fresh processes, as a confirmation does."""
    (result,) = driver.run(Work((driver.plan_again(Purpose.CONFIRM, candidate),)))
    driver.next_ended(timeout_s=0.0)
    assert isinstance(result, TrialResult)
    driver.tell(result)
    return result


def courses_of(folder: Path, typed: str, work: Path) -> dict[str, Course | str]:
    """Returns how a program trains in each way, by its name; why not, where it does not."""
    arguments = StudyArguments(command=tuple(shlex.split(typed)), model_dir=folder, method="random")
    study = new_study(arguments, work)
    driver, found = study.driver, dict[str, Course | str]()
    try:
        (profile,) = driver.run(Work((driver.profile_plan(),)))
        assert isinstance(profile, TrialResult)
        driver.next_ended(timeout_s=0.0)
        driver.tell(profile)
        submitted = driver.submitted_plan() if profile.outcome is Outcome.COMPLETED else None
        if submitted is None:
            return {"as typed": profile.reason or "its batch is not known"}
        own = submitted.candidate
        for stage, power in WAYS:
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
            result = measure(driver, candidate)
            config = candidate.complete(driver.base_config)
            found[f"z{stage}, {micro} x {accumulation}"] = result.reason
            if result.outcome is Outcome.COMPLETED:
                # A way that had no effect would be compared with itself.
                assert config["zero_optimization"]["stage"] == stage
                assert result.micro_batch_arrived == micro
                course = Course(candidate, config, [result.losses], [result.initial_weights])
                found[f"z{stage}, {micro} x {accumulation}"] = course
    finally:
        study.close()
    return found


def copied(folder: Path, more: dict[str, Any], into: Path) -> Path:
    """Returns a copy of a program's folder, with a configuration beside it."""
    copy = into / "program"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("__pycache__", "zerotune-studies", "out"))
    (copy / "aa.json").write_text(json.dumps({**CONFIG, **more}))
    return copy


def typed_in(case: Path) -> str:
    """Returns the command of a case, which its file COMMAND has behind `--`."""
    return (case / "COMMAND").read_text().partition(" -- ")[2].strip()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--pairs", type=int, default=100, help="how many to compare at most")
    parser.add_argument(
        "--case", type=Path, action="append", default=[], help="a folder with a program and its COMMAND"
    )
    arguments = parser.parse_args()
    cases = [(case.name, case, typed_in(case), dict[str, Any]()) for case in arguments.case]
    pairs: list[dict[str, Any]] = []
    courses: list[dict[str, Any]] = []
    left_out: list[dict[str, str]] = []
    for name, folder, typed, more in [*cases, *OWN]:
        with tempfile.TemporaryDirectory(prefix="loss-agreement-") as work:
            found = courses_of(copied(folder, more, Path(work)), typed, Path(work))
        measured = {way: course for way, course in found.items() if isinstance(course, Course)}
        courses += [
            {"program": name, "way": way, "losses": course.losses[0], "initial_weights": course.weights[0]}
            for way, course in measured.items()
        ]
        left_out += [{"program": name, "way": way, "why": why} for way, why in found.items() if isinstance(why, str)]
        for one, other in itertools.islice(itertools.combinations(measured, 2), PAIRS_OF_A_PROGRAM):
            agreement = compare(measured[one], measured[other])
            said = {"program": name, "own": one, "candidate": other, **agreement.model_dump()}
            pairs = [*pairs, said][: arguments.pairs]
        print(name, len(measured), "ways,", len(pairs), "pairs", flush=True)
        write(pairs, courses, left_out)
        if len(pairs) == arguments.pairs:
            break


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
