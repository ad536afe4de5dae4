"""Foresees each arm of the recorded tables at two micro-batches, and writes the bytes of its moments.

Each run is of the table's own program as rank 0 of two, under fake tensors. No recorded trial is looked at.
"""

import argparse
import json
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.memory_model.record import PROGRAMS as MORE
from benchmarks.memory_model.record import RECORDED, TABLES, experiment_of
from benchmarks.replay.recorded import RecordedTable, read_table
from benchmarks.replay.space_of_table import space_of
from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH, overwrite_deepspeed_config
from zerotune.trial_lib.inputs.read_experiment import Experiment, read_experiment
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.launch.starters import WarmStarter
from zerotune.trial_lib.messages.files import write_all
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.arm_bytes import foreseen_arm
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for
from zerotune.trial_lib.study.program import environment_of, program_of

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
FORESEEN = HERE / "foreseen"
REPLAY, OTHERS = ROOT / "benchmarks" / "replay", HERE / "other_programs"
# The table, the YAML and the folder of each program. Those of `more_programs` have their YAML from `record.py`.
PROGRAMS = {
    "convnet": (REPLAY / "tables" / "convnet.jsonl", REPLAY / "convnet.yaml", REPLAY / "convnet"),
    "recurrent": (REPLAY / "tables" / "recurrent.jsonl", REPLAY / "recurrent.yaml", REPLAY / "recurrent"),
    "transformer": (
        REPLAY / "tables" / "transformer.jsonl",
        REPLAY / "transformer.yaml",
        ROOT / "examples" / "hello_deepspeed",
    ),
    **{name: (OTHERS / f"{name}.jsonl", OTHERS / f"{name}.yaml", OTHERS) for name in ("decoder", "wide", "shrinking")},
    **{name: (TABLES / f"{name}.jsonl", None, MORE) for name in RECORDED},
}
SIZES = (16, 48)


class Foreseeing:
    """Foresees one program's runs, each in a fork of one server."""

    def __init__(self, experiment: Experiment, slots: int, folder: Path) -> None:
        self._experiment = experiment
        self._slots = slots
        self._folder = folder
        self._environment = environment_of(experiment, (), "cpu")
        self._starter: WarmStarter | None = None

    def run(self, config: Mapping[str, Any]) -> ForeseenRun:
        """Returns the run of a complete DeepSpeed configuration."""
        own = Path(tempfile.mkdtemp(dir=self._folder))
        program = program_of(self._experiment, self._environment, own / "ds_config.json", config, own / "training.json")
        (own / "ds_config.json").write_text(json.dumps(config))
        write_all(program.files)
        return simulate(
            program, config, Pretended(world=self._slots, ranks_per_host=self._slots), own, self._of(program)
        )

    def close(self) -> None:
        """Ends the server."""
        if self._starter is not None:
            self._starter.close()

    def _of(self, program: Program) -> WarmStarter:
        if self._starter is None:
            self._starter = starter_for(program, self._folder / "server", print)
        return self._starter


def configurations(table: RecordedTable) -> dict[str, dict[str, Any]]:
    """Returns the configuration of each arm at its best guess of the fine knobs, by its label."""
    by_family = {json.dumps(candidate.knobs, sort_keys=True): candidate.knobs for candidate in table.candidates()}
    return {
        arm.label: overwrite_deepspeed_config(table.head.base_config, arm.family(0))
        for arm in space_of(by_family.values()).arms
    }


def foresee_table(name: str) -> list[dict[str, Any]]:
    """Returns the foreseen arms of a table as plain data, and prints a line for each."""
    path, yaml, model_dir = PROGRAMS[name]
    table = read_table(path)
    sizes = RECORDED[name][1][1:4:2] if name in RECORDED else SIZES
    found = []
    with tempfile.TemporaryDirectory() as folder, nullcontext(yaml) if yaml else experiment_of(name) as experiment:
        foreseeing = Foreseeing(read_experiment(experiment, model_dir), table.head.slots, Path(folder))
        try:
            for label, config in configurations(table).items():
                runs = [foreseeing.run({**config, MICRO_BATCH: size}) for size in sizes]
                arm = foreseen_arm(runs, table.head.device)
                stopped = next((run.stopped for run in runs if run.stopped), "")
                seconds = sum(run.seconds for run in runs)
                print(f"{name} {label}: {stopped or _shown(arm)}, {seconds:.1f} s", flush=True)
                if arm is not None:
                    found.append(asdict(arm))
        finally:
            foreseeing.close()
    return found


def _shown(arm: Any) -> str:
    lines = ((part, getattr(arm, part)) for part in ("backward", "update"))
    return ", ".join(
        f"{part} {line.constant / 2**20:.1f} MiB and {line.per_sample / 2**20:.3f} a sample" for part, line in lines
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(PROGRAMS)}; all by default")
    FORESEEN.mkdir(exist_ok=True)
    for name in parser.parse_args().names or PROGRAMS:
        arms = foresee_table(name)
        (FORESEEN / f"{name}.json").write_text(json.dumps(arms, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
