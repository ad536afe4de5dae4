"""Studies of what people type: is the answer an edit of their own files, and is the gain theirs without ZeroTune?"""

import argparse
import json
import math
import os
import re
import shlex
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.programs.commands import BY_TRAINER, PROGRAMS, Program
from benchmarks.programs.run import BIN, ROOT, WARM_UP, steps_of_ranks, summary, tune, winner_command
from zerotune.trial_lib.records.folders import OwnCommand, StudyPaths

RESULTS = ROOT / "benchmarks" / "results" / "frameworks.jsonl"
PAGE = ROOT / "docs" / "frameworks.md"
# An environment for each package that goes with no other (`make frameworks`).
ENVIRONMENTS = Path(os.environ.get("ZEROTUNE_FRAMEWORKS", ROOT / "build" / "frameworks"))
ALONE = {
    **{"CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"},
    "DISABLE_VERSION_CHECK": "1",
}
FRAMEWORKS = PROGRAMS / "frameworks"
# The quantile of Student's distribution for the mean of so many rounds.
T_95 = {2: 12.71, 3: 4.30, 4: 3.18, 5: 2.78}


@dataclass(frozen=True)
class Case:
    """One framework.

    Attributes:
        title: for people.
        packages: whose versions are recorded beside torch's and DeepSpeed's.
        folder: which is copied.
        typed: the command.
        variables: that its users type before it.
        environment: the folder of its Python below `ENVIRONMENTS`; empty for this one.
        prepare: a script that runs first.
        flags: of `zerotune tune`, or of `zerotune plan`.
    """

    title: str
    packages: tuple[str, ...]
    folder: Path
    typed: str
    variables: Mapping[str, str] = field(default_factory=dict)
    environment: str = ""
    prepare: str = ""
    flags: tuple[str, ...] = ()
    plan: bool = False  # whether it is planned, because it trains on no CPU

    @property
    def bin(self) -> Path:
        """The folder of its Python."""
        return ENVIRONMENTS / self.environment / "bin" if self.environment else BIN

    def program(self) -> Program:
        """What is measured."""
        return Program(self.title, self.folder, tuple(shlex.split(self.typed)), self.variables, self.flags)

    def shell(self) -> dict[str, str]:
        """What its user's shell has, with its environment active."""
        found = {**ALONE, "PATH": os.pathsep.join([str(self.bin), str(BIN), os.environ["PATH"]])}
        if self.environment:
            found["TORCH_EXTENSIONS_DIR"] = str(ENVIRONMENTS / self.environment / "extensions")
        return found

    def versions(self) -> dict[str, str]:
        """The versions of its packages where it runs."""
        code = "import sys, importlib.metadata as m; print(*map(m.version, sys.argv[1:]))"
        names = ("torch", "deepspeed", *self.packages)
        said = subprocess.run([self.bin / "python", "-c", code, *names], check=True, capture_output=True, text=True)
        return dict(zip(names, said.stdout.split(), strict=True))


def _hub(title: str, package: str, typed: str, *packages: str, **variables: str) -> Case:
    environment = package.removeprefix("ms-")
    packages = (package, "transformers", *packages)
    return Case(title, packages, FRAMEWORKS, typed, variables, environment, "make_model.py", ("--max-trials", "4"))


SWIFT = (
    "swift sft --model ./tiny --model_type llama --template dummy --dataset ./messages.jsonl --tuner_type full "
    "--deepspeed zero2 --per_device_train_batch_size 2 --gradient_accumulation_steps 4 --max_steps 400 "
    "--max_length 128 --output_dir out/swift --use_cpu true --torch_dtype float32 --fp16 false --report_to none "
    "--save_strategy no --eval_strategy no --split_dataset_ratio 0 --check_model false"
)
FEW = ("--max-trials", "6")
CASES = {
    "trainer": Case(
        "Hugging Face Trainer",
        ("transformers", "accelerate"),
        PROGRAMS / "any",
        BY_TRAINER.format("trainer.py --hidden_size 64").replace("--max_steps 60", "--max_steps 400"),
        flags=FEW,
    ),
    "in_code": Case(
        "`TrainingArguments` in the code",
        ("transformers", "accelerate"),
        FRAMEWORKS / "in_code",
        "torchrun --nproc_per_node 2 train.py",
        flags=FEW,
    ),
    "trl": _hub("TRL", "trl", "trl sft --config sft.yaml --accelerate_config plugin.yaml", "accelerate"),
    "llamafactory": _hub(
        "LLaMA-Factory",
        "llamafactory",
        "llamafactory-cli train lf_sft.yaml",
        FORCE_TORCHRUN="1",
        NPROC_PER_NODE="2",
    ),
    "swift": _hub("ms-swift", "ms-swift", SWIFT, NPROC_PER_NODE="2"),
    "axolotl": Case(
        "Axolotl",
        ("axolotl", "transformers"),
        FRAMEWORKS,
        "axolotl train axo.yml --launcher torchrun -- --nproc_per_node 2",
        environment="axolotl",
        prepare="make_model.py",
        flags=("--on", "h100-80gb:2"),
        plan=True,
    ),
    "accelerate": Case(
        "Accelerate",
        ("accelerate",),
        FRAMEWORKS / "accelerate",
        "accelerate launch --config_file zero2.yaml loop.py --train_batch_size 4",
        flags=FEW,
    ),
    "lightning": Case(
        "Lightning's command line",
        ("lightning", "jsonargparse"),
        FRAMEWORKS / "lightning",
        "python main.py fit --config fit.yaml",
        environment="lightning",
        flags=FEW,
    ),
    "hydra": Case(
        "Hydra",
        ("hydra-core",),
        PROGRAMS / "others" / "hydra_overrides",
        "deepspeed --no_local_rank --num_gpus 2 fit.py loop.batch=8 engine=sharded",
        flags=FEW,
    ),
    "argparse": Case(
        "argparse",
        (),
        PROGRAMS / "others" / "megatron_flags",
        "deepspeed --num_gpus 2 pretrain.py --micro-batch-size 4 --global-batch-size 32 --zero-stage 1 --deepspeed "
        "--deepspeed_config ds_config.json",
        flags=FEW,
    ),
    "neox": Case(
        "GPT-NeoX's YAML files",
        (),
        FRAMEWORKS / "neox",
        "python deepy.py train.py -d configs model.yml local.yml",
        flags=FEW,
    ),
    "trial_class": Case(
        "DeepSpeedTrial",
        (),
        FRAMEWORKS / "trial_class",
        "zerotune train trial.yaml .",
        flags=("trial.yaml", ".", *FEW),
    ),
}


def study(case: Case, rounds: int, work: Path) -> dict[str, Any]:
    """Tunes a framework, and trains with its answer beside what was typed, in turns. Returns the row of the results.

    A study that the folder has already is not run again.
    """
    program, kept = case.program(), work / "study.json"
    folder = work / "program"
    if not kept.exists():
        program.copy(work)
        if case.prepare:
            subprocess.run([case.bin / "python", case.prepare], cwd=folder, check=True, capture_output=True)
        begin = time.monotonic()
        code, document = tune(folder, program, "plan" if case.plan else "tune")
        row = {
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "versions": case.versions(),
            "typed": shlex.join([*(f"{name}={value}" for name, value in case.variables.items()), *program.typed]),
            "study_s": round(time.monotonic() - begin),
            "exit_code": code,
        }
        kept.write_text(json.dumps([row, document]))
    row, document = json.loads(kept.read_text())
    if case.plan:
        return {**row, "answer": document.get("answer", document.get("reason")), "planned_on": case.flags[-1]}
    winner = (document.get("confirmation") or {}).get("winner")
    if winner is None or winner["verdict"] == "own":
        return {**row, "answer": document.get("reason") or document["confirmation"]["sentence"]}
    paths = StudyPaths(Path(document["best_ds_config_path"]).parent)
    own = OwnCommand.of(paths)
    words, variables, config = winner_command(document)
    changed = folder
    if config is not None:
        # The edits of the code, as the answer has them, in a copy.
        changed = work / "changed"
        shutil.copytree(folder, changed, ignore=shutil.ignore_patterns("zerotune-studies"), dirs_exist_ok=True)
        edits = "".join(line[4:] + "\n" for line in document["command"].splitlines() if line.startswith("#   "))
        patched = subprocess.run(["patch", "-p0"], cwd=changed, input=edits, capture_output=True, text=True)
        if patched.returncode:
            raise RuntimeError(f"{patched.stdout}{patched.stderr}{document['command']}")
    confirmed = {"typed": document["confirmation"]["own"], "best": winner}
    row |= {
        "answer": document["confirmation"]["sentence"],
        "gain": winner["gain"],
        "is_own_command": own is not None,
        "best": shlex.join(own.words) if own else document["command"],
        "diff": own.diff if own else "",
        "samples_per_s_in_trials": {name: each["metrics"]["throughput"] for name, each in confirmed.items()},
    }
    row = json.loads(json.dumps(row).replace(paths.root.name, "STUDY").replace(str(folder), "."))
    if not rounds:
        return row
    ran: dict[str, list[list[list[dict[str, Any]]]]] = {"typed": [], "best": []}
    for _ in range(rounds):
        ran["typed"].append(steps_of_ranks(folder, program.typed, program.variables))
        ran["best"].append(steps_of_ranks(changed, words, {**program.variables, **variables}))
    trials = {"typed": confirmed["typed"]["trials"][0], "best": document["best"]["trial"]}
    engines = {
        name: json.loads(paths.trial(each).engine_built(0).read_text())["engine"] for name, each in trials.items()
    }
    speeds = {name: [samples_per_s(run) for run in runs] for name, runs in ran.items()}
    logs = [math.log(high / low) for low, high in zip(speeds["typed"], speeds["best"], strict=True)]
    mean, half = statistics.fmean(logs), T_95[rounds] * statistics.stdev(logs) / math.sqrt(rounds)
    plain = {"value": math.exp(mean), "low": math.exp(mean - half), "high": math.exp(mean + half)}
    return {
        **row,
        "engine_differs": list(differences(engines["best"], ran["best"][0][0][0]["engine"])),
        "typed_engine_differs": list(differences(engines["typed"], ran["typed"][0][0][0]["engine"])),
        "samples_per_s": speeds,
        "samples_per_s_of_median_steps": {name: [summary(run).samples_per_s for run in ran[name]] for name in ran},
        "gain_plainly": plain,
        "within": winner["gain"]["low"] <= plain["value"] <= winner["gain"]["high"],
    }


def samples_per_s(ranks: Sequence[Sequence[dict[str, Any]]]) -> float:
    """All samples over all time, as a study counts them, and not those of a median step."""
    steps = range(WARM_UP, len(ranks[0]))
    rows = [sum(rank[step]["rows"] for rank in ranks) for step in steps]
    samples = sum(rows) if len(set(rows)) > 1 else ranks[0][WARM_UP]["batch"][2] * len(rows)
    return float(samples / (ranks[0][-1]["clock"] - ranks[0][WARM_UP - 1]["clock"]))


def differences(recorded: Mapping[str, Any], plain: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    """Yields the settings that two engines have not in common, of those that a trial records."""
    assert recorded
    for name, value in recorded.items():
        other = plain.get(name)
        if isinstance(value, dict) and value and isinstance(other, dict):
            yield from differences(value, other, f"{prefix}{name}.")
        elif value != other:
            yield f"{prefix}{name}: {value!r}, and {other!r} without ZeroTune"


def results() -> dict[str, dict[str, Any]]:
    """The last row of each framework."""
    rows = map(json.loads, RESULTS.read_text().splitlines()) if RESULTS.exists() else ()
    return {row["name"]: row for row in rows}


# The page: hand-written, but for what stands between two marks.


def page(text: str, rows: Mapping[str, Mapping[str, Any]]) -> str:
    """The page with what the results say. A name without a result has nothing between its marks."""

    def block(found: re.Match[str]) -> str:
        name = found[1]
        lines = table(rows) if name == "table" else shown(rows[name]) if name in rows else ()
        return "\n".join([f"<!-- {name} -->", *lines, "<!-- end -->"])

    return re.sub(r"<!-- (\w+) -->\n.*?<!-- end -->", block, text, flags=re.DOTALL)


def table(rows: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yields the lines of the table of all frameworks."""
    yield "| framework | versions | gain, 95 % CI | without ZeroTune, 95 % CI | engine | minutes |"
    yield "|---|---|---|---|---|---|"
    for name, row in rows.items():
        versions = ", ".join(f"{package} {version}" for package, version in row["versions"].items())
        gains = [_gain(row["gain"]) if "gain" in row else row["answer"]]
        gains.append(_gain(row["gain_plainly"]) if "gain_plainly" in row else "not run")
        if not row.get("within", True):
            gains[1] += ", outside"
        engine = "-" if "engine_differs" not in row else "other" if row["engine_differs"] else "same"
        if "planned_on" in row:
            gains[0] = f"planned in {row['study_s']} s for {row['planned_on']}: {row['answer']}"
        cells = [f"{CASES[name].title}, {row['date']}", versions, *gains, engine, f"{row['study_s'] / 60:.1f}"]
        yield f"| {' | '.join(cells)} |"


def shown(row: Mapping[str, Any]) -> Iterator[str]:
    """Yields what a framework's section has of its study."""
    plan = f"zerotune plan --on {row['planned_on']} -- " if "planned_on" in row else ""
    yield from ("```", f"$ {plan}{row['typed']}")
    if "gain" not in row:
        yield from (row["answer"], "```")
        return
    yield from (row["answer"], "$ sh zerotune-studies/STUDY/best_command.txt")
    yield from (*row["best"].strip().splitlines(), "```")
    if row["diff"]:
        yield from ("```diff", *row["diff"].splitlines(), "```")


def _gain(gain: Mapping[str, float]) -> str:
    return f"{gain['value']:.2f} ({gain['low']:.2f} to {gain['high']:.2f})"


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(CASES)}")
    parser.add_argument("--work", type=Path, help="an empty folder for the study, or one that has it already")
    parser.add_argument("--rounds", type=int, default=3, choices=(0, *T_95), help="plain runs of each command, in turn")
    given = parser.parse_args(arguments)
    for name in given.names:  # none: the page is written anew
        case = CASES[name]
        with tempfile.TemporaryDirectory(prefix="frameworks-") as work, patch.dict(os.environ, case.shell()):
            row = {"name": name, **study(case, given.rounds, given.work or Path(work))}
        rows = {**results(), name: row}
        RESULTS.write_text("".join(json.dumps(rows[each]) + "\n" for each in CASES if each in rows))
        print(json.dumps(row, indent=2), flush=True)
    PAGE.write_text(page(PAGE.read_text(), results()))


if __name__ == "__main__":
    main()
