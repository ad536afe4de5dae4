"""Measures the phases of one trial, warm and cold, in turn: of a plain script and of one that imports a great deal."""

import argparse
import json
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from unittest.mock import patch

from zerotune.trial_lib.deepspeed_config.overrides import config_hash, read_deepspeed_json
from zerotune.trial_lib.device.this_host import this_host
from zerotune.trial_lib.launch.rank_starter import Program, RankStarter
from zerotune.trial_lib.launch.starters import ColdStarter, WarmStarter, rank_environment
from zerotune.trial_lib.launch.trial import ThisHost, TrialPlan
from zerotune.trial_lib.messages.orders import StepWindow
from zerotune.trial_lib.records.candidate import Candidate, Purpose
from zerotune.trial_lib.records.folders import TrialPaths
from zerotune.trial_lib.records.result import TrialResult

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "benchmarks" / "results" / "trial_start.json"
BUILDERS = ["ShareMemCommBuilder", "FusedAdamBuilder"]
# Without it the Trainer would count one rank on a machine that has no GPU.
ON_CPU = ("--use_cpu",) if this_host().device == "cpu" else ()
START = ("start", "import", "initialize")
# As a trial starts where the kernel puts no layer over the program's folder.
INTERCEPTED = "warm, files intercepted"


@dataclass(frozen=True)
class Script:
    """A training as its user starts it, in `folder`, with `config` after `flag`."""

    folder: Path
    name: str
    flag: str
    config: str
    takes_local_rank: bool
    arguments: tuple[str, ...] = ()


SCRIPTS = {
    "plain": Script(ROOT / "examples" / "hello_deepspeed", "train.py", "--deepspeed_config", "ds_config.json", True),
    "Hugging Face Trainer": Script(
        ROOT / "tests" / "programs" / "any", "trainer.py", "--deepspeed", "ds_auto.json", False, ON_CPU
    ),
}


def trial(
    script: Script, starter: RankStarter, folder: Path, purpose: Purpose = Purpose.SEARCH, is_layered: bool = True
) -> TrialResult:
    """Runs one trial on two ranks, of one optimizer step, with or without a layer over the program's folder."""
    candidate = Candidate(micro_batch_size=4, gradient_accumulation_steps=1, slots=2)
    config = candidate.complete(read_deepspeed_json(script.folder / script.config))
    paths = TrialPaths(folder)
    arguments = [script.flag, str(paths.ds_config), *script.arguments]
    program = Program(
        sys.executable, {"script": script.name}, arguments, script.takes_local_rank, script.folder, rank_environment()
    )
    window = StepWindow(start_step=1, end_step=1, max_steps=1)
    plan = TrialPlan(
        trial_id=folder.name,
        number=0,
        purpose=purpose,
        candidate=candidate,
        ds_config=config,
        config_hash=config_hash(config),
        program=program,
        deadline_s=300,
        paths=paths,
        window=window,
        memory_limit=None,
    )
    layer = nullcontext() if is_layered else patch("zerotune.trial_lib.launch.trial.layer_for", lambda *_: None)
    with layer:
        result = ThisHost(starter, this_host(), folder.parent / "locks").run_trial(plan, threading.Event())
    assert result.metrics, result.reason
    if not is_layered:
        assert result.files == "intercepted", result.files
    return result


def timed(call: Callable[[], object]) -> float:
    """Returns the seconds that a call takes."""
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def phases(result: TrialResult, whole: float) -> dict[str, float]:
    """Returns the seconds of a trial's phases, and sums of them."""
    return {
        **result.phases,
        "start to engine": sum(result.phases[phase] for phase in START),
        "start to first step, beyond the engine": sum(
            result.phases[phase] for phase in ("start", "import", "first_step")
        ),
        "whole trial": whole,
    }


def measure(script: Script, repeats: int, work: Path) -> dict[str, object]:
    """Returns the medians of a script's phases, warm and cold in turn, after what a study does first."""
    work.mkdir()
    # As a user has it: the trials' folders beside the program, on one file system.
    script = replace(script, folder=shutil.copytree(script.folder, work / "program"))
    environment = rank_environment()
    warm = WarmStarter(sys.executable, BUILDERS, environment, str(work / "server.log"), print)
    starters: dict[str, RankStarter] = {"warm": warm, "cold": ColdStarter(sys.executable, BUILDERS, environment, print)}
    profiles: list[TrialResult] = []
    first = timed(lambda: profiles.append(trial(script, warm, work / "profile", Purpose.PROFILE)))
    own_imports = timed(lambda: warm.prime(profiles[0].imported))
    trial(script, starters["cold"], work / "first-cold")
    ways = (("warm", True), (INTERCEPTED, False), ("cold", True))
    measured: dict[str, list[dict[str, float]]] = {name: [] for name, _ in ways}
    files = set[str]()
    for repeat in range(repeats):
        for name, is_layered in ways:
            results: list[TrialResult] = []
            folder, starter = work / f"{name}-{repeat}", starters["cold" if name == "cold" else "warm"]
            whole = timed(
                lambda: results.append(trial(script, starter, folder, is_layered=is_layered))  # noqa: B023
            )
            measured[name].append(phases(results[0], whole))
            files.update([results[0].files] if is_layered else [])
    warm.close()
    medians = {
        name: {phase: statistics.median(run[phase] for run in runs) for phase in runs[0]}
        for name, runs in measured.items()
    }
    return {
        "priming and the profile trial": round(first, 3),
        "priming the script's own imports": round(own_imports, 3),
        **{name: {phase: round(value, 3) for phase, value in run.items()} for name, run in medians.items()},
        "files of the others": sorted(files),
        "start to engine, warm / cold": round(
            medians["warm"]["start to engine"] / medians["cold"]["start to engine"], 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--output", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    work = Path(tempfile.mkdtemp(prefix="trial-start-"))
    report = {
        name: measure(script, arguments.repeats, work / str(number))
        for number, (name, script) in enumerate(SCRIPTS.items())
    }
    arguments.output.write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()
