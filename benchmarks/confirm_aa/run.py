"""Confirms a configuration against itself again and again, with real processes; counts how often it is called equal."""

import argparse
import json
import platform
import statistics
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml

from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.result import TrialResult
from zerotune.trial_lib.study.arguments import StudyArguments
from zerotune.trial_lib.study.confirmation import Confirmation, Contender
from zerotune.trial_lib.study.driver import StudyDriver
from zerotune.trial_lib.study.finding import Finding
from zerotune.trial_lib.study.open_study import new_study
from zerotune.trial_lib.study.runner import Work

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "confirm_aa.json"
METRIC = "throughput"
EXPERIMENT = {
    "name": "confirm-aa",
    "entrypoint": "deepspeed train.py --deepspeed_config ds_config.json --layers 1 --hidden 128 --seq_length 32",
    "hyperparameters": {"deepspeed_config": "ds_config.json"},
    "resources": {"slots_per_trial": 2, "memory_per_slot": "600 MiB"},
    "max_restarts": 0,
}


def measure(driver: StudyDriver, candidate: Candidate) -> TrialResult:
    """Measures a candidate in fresh processes."""
    (result,) = driver.run(Work((driver.plan_again(Purpose.RECORD, candidate),)))
    driver.next_ended(timeout_s=0.0)
    assert isinstance(result, TrialResult)
    return result


def confirm(driver: StudyDriver, reading: TrialResult, search_seconds: float) -> tuple[Finding, list[float]]:
    """Confirms one configuration as if it were two. Also returns the seconds of a sample of each trial, in order."""
    candidate = driver.state.candidates[reading.number]
    config = candidate.complete(driver.known.base_config)
    own, twin = (
        Contender(candidate.model_copy(), config, replace(reading, config_hash=name)) for name in ("own", "twin")
    )
    confirmation = Confirmation(own, [twin], METRIC, search_seconds)
    seconds = []
    while (asked := confirmation.next) is not None:
        key = "own" if asked is own.candidate else "twin"
        result = measure(driver, candidate)
        seconds.append(1.0 / result.metrics[METRIC])
        confirmation.tell(replace(result, config_hash=key))
    return confirmation.finding(), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--confirmations", type=int, default=100)
    parser.add_argument("--search-seconds", type=float, default=60.0, help="what the search is said to have taken")
    arguments = parser.parse_args()
    found: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="confirm-aa-") as work:
        config = Path(work) / "experiment.yaml"
        config.write_text(yaml.safe_dump(EXPERIMENT))
        model_dir = ROOT / "examples" / "hello_deepspeed"
        study = new_study(StudyArguments(config_path=config, model_dir=model_dir, method="random"), Path(work))
        driver = study.driver
        try:
            (profile,) = driver.run(Work((driver.profile_plan(),)))
            driver.tell(profile)
            submitted = driver.submitted_plan()
            assert submitted is not None
            (reading,) = driver.run(Work((submitted,)))
            assert isinstance(reading, TrialResult)
            for number in range(arguments.confirmations):
                begun = time.monotonic()
                finding, readings = confirm(driver, reading, arguments.search_seconds)
                (twin,) = finding.candidates
                gain = None if twin.gain is None else (twin.gain.value, twin.gain.low, twin.gain.high)
                told = {"verdict": twin.verdict, "gain": gain, "rounds": finding.rounds, "losses": twin.losses}
                told |= {"more_rounds": finding.more_rounds, "seconds": time.monotonic() - begun}
                found.append({**told, "seconds_a_sample": readings})
                print(number, found[-1], flush=True)
                write(found)
        finally:
            study.close()


def write(found: list[dict[str, Any]]) -> None:
    """Writes what was found so far."""
    equal = sum(one["verdict"] == "equal" for one in found)
    report = {
        "machine": platform.processor() or platform.machine(),
        "confirmations": len(found),
        "called_equal": equal,
        "share_equal": equal / len(found),
        "median_seconds": statistics.median(one["seconds"] for one in found),
        "median_rounds": statistics.median(one["rounds"] for one in found),
        "median_half_width": statistics.median((one["gain"][2] - one["gain"][1]) / 2 for one in found if one["gain"]),
        "each": found,
    }
    RESULTS.write_text(json.dumps(report, indent=2) + "\n")


if __name__ == "__main__":
    main()
