"""Compares the live bytes of foreseen runs with those of real CPU ranks, storage by storage.

`python -m benchmarks.foresee.bytes_exactly.run [--worlds 2 4] [--stages 0 1 2 3] [--pipelines 2x1 4x1 2x2]`
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotune.trial_lib.launch.locks import reserved_port
from zerotune.trial_lib.launch.rank_starter import Program
from zerotune.trial_lib.messages.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun
from zerotune.trial_lib.messages.shared_segments import BUFFERS, FOLDER
from zerotune.trial_lib.plan.arm_work import micro_batches_of_a_run
from zerotune.trial_lib.plan.simulation import Pretended, simulate, starter_for

ROOT = Path(__file__).resolve().parents[3]
RESULTS = ROOT / "benchmarks" / "results" / "foresee_bytes_exactly.json"
PROGRAM = ROOT / "tests" / "programs" / "transformer.py"
PIPELINE = Path(__file__).with_name("pipeline.py")
STEPS = 2
# Of a step of a real pipeline. A plan runs fewer.
MICRO_BATCHES = 8


def config_of(stage: int, precision: str, accumulation: int) -> dict[str, Any]:
    """Returns a DeepSpeed configuration with small buckets, so that they do not hide everything else."""
    return {
        "train_micro_batch_size_per_gpu": 2,
        "gradient_accumulation_steps": accumulation,
        # Torch's own loop over parameters: on a CPU there is no other, on a GPU it would be a fused update.
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True, "foreach": False}},
        "gradient_clipping": 1.0,
        "bf16": {"enabled": precision == "bf16"},
        "zero_optimization": {
            "stage": stage,
            "reduce_bucket_size": 100_000,
            "allgather_bucket_size": 100_000,
            "stage3_prefetch_bucket_size": 100_000,
            "stage3_param_persistence_threshold": 0,
        },
    }


def by_moment(run: ForeseenRun) -> list[tuple[str, int, dict[str, int]]]:
    """Returns, for each moment, its name, the peak of live bytes on the device, and the bytes by kind at its end."""
    live = dict.fromkeys(KINDS, 0)
    rows = []
    for moment, its_events in run.events_by_moment():
        peak = sum(live.values())
        for event in (run.events[index] for index in its_events):
            storage = run.storages[event.storage]
            if PLACES[storage.place] == "device":
                live[KINDS[storage.kind]] += storage.size if event.is_made else -storage.size
                peak = max(peak, sum(live.values()))
        rows.append((f"{MOMENTS[moment.name]} {moment.step}.{moment.micro_batch}", peak, dict(live)))
    return rows


def real(script: Path, arguments: Sequence[str], world: int, folder: Path) -> ForeseenRun:
    """Runs real ranks over gloo, and returns the record of rank 0."""
    with reserved_port() as port:
        try:
            return _real(script, arguments, world, folder, port)
        finally:
            # The ranks end without a word, and leave DeepSpeed's buffers behind.
            for left in FOLDER.glob(f"{BUFFERS}*_{port}_*"):
                left.unlink()


def _real(script: Path, arguments: Sequence[str], world: int, folder: Path, port: int) -> ForeseenRun:
    order, result = folder / "order.json", folder / "real.json"
    order.write_text(json.dumps({"script": str(script), "arguments": arguments, "steps": STEPS, "result": str(result)}))
    shared = {"WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world, "LOCAL_SIZE": world, "MASTER_PORT": port}
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    environment |= {name: str(value) for name, value in shared.items()}
    command = [sys.executable, "-m", "benchmarks.foresee.bytes_exactly.real_rank", str(order)]
    with (folder / "real.log").open("w") as log:
        ranks = [
            subprocess.Popen(
                command,
                env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                cwd=ROOT,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
            for rank in range(world)
        ]
        for rank in ranks:
            rank.wait(timeout=900)
    return ForeseenRun.from_json(json.loads(result.read_text()))


def peak_of(run: ForeseenRun) -> int:
    """Returns the most live bytes on the device."""
    return max(peak for _, peak, _ in by_moment(run))


def compare(foreseen: ForeseenRun, measured: ForeseenRun) -> dict[str, Any]:
    """Returns peaks, and where the two differ by kind."""
    pairs = list(zip(by_moment(foreseen), by_moment(measured), strict=True))
    differences = {}
    for (name, _, ours), (other, _, theirs) in pairs:
        assert name == other, (name, other)
        found = {kind: ours[kind] - theirs[kind] for kind in KINDS if ours[kind] != theirs[kind]}
        if found:
            differences[name] = found
    foreseen_peak, real_peak = (max(row[side][1] for row in pairs) for side in (0, 1))
    return {
        "foreseen_peak": foreseen_peak,
        "real_peak": real_peak,
        "difference": foreseen_peak - real_peak,
        "largest_difference_of_a_moment": max((abs(ours[1] - theirs[1]) for ours, theirs in pairs), default=0),
        "moments": len(pairs),
        "moments_with_equal_peaks": sum(ours[1] == theirs[1] for ours, theirs in pairs),
        "differences_at_the_end_of_moments": differences,
    }


class Simulator:
    """Foresees programs for worlds as large as the real ones."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._starter = starter_for(self._program(PROGRAM, []), folder, print)
        self.close = self._starter.close

    def __call__(self, script: Path, arguments: Sequence[str], world: int) -> ForeseenRun:
        program = self._program(script, arguments)
        pretended = Pretended(world=world, ranks_per_host=world)
        run = simulate(program, {}, pretended, self._folder, self._starter, deadline_s=600, steps=STEPS)
        assert not run.stopped, run.stopped
        return run

    @staticmethod
    def _program(script: Path, arguments: Sequence[str]) -> Program:
        return Program(
            interpreter=sys.executable,
            target={"script": script.name},
            arguments=list(arguments),
            local_rank_option="",
            model_dir=script.parent,
            environment=dict(os.environ),
        )


def transformers(options: argparse.Namespace, folder: Path, foreseen: Simulator) -> Iterator[dict[str, Any]]:
    """Yields the comparison for each world, ZeRO stage and precision."""
    config = folder / "ds_config.json"
    arguments = ["--deepspeed_config", str(config)]
    for world in options.worlds:
        for stage in options.stages:
            for precision in options.precisions:
                accumulation = 2 if world == min(options.worlds) else 1
                config.write_text(json.dumps(config_of(stage, precision, accumulation)))
                measured = real(PROGRAM, arguments, world, folder)
                case = {"world": world, "stage": stage, "precision": precision, "accumulation": accumulation}
                yield {**case, **compare(foreseen(PROGRAM, arguments, world), measured)}


def pipelines(options: argparse.Namespace, folder: Path, foreseen: Simulator) -> Iterator[dict[str, Any]]:
    """Yields the comparison for each pipeline. The foreseen run has the micro-batches of a plan's run."""

    def arguments_of(stages: int, micro_batches: int) -> list[str]:
        config = folder / f"{micro_batches}.json"
        config.write_text(json.dumps(config_of(0, "fp32", micro_batches)))
        return ["--deepspeed_config", str(config), "--stages", str(stages)]

    for shape in options.pipelines:
        stages, slices = map(int, shape.split("x"))
        shown, world = micro_batches_of_a_run(MICRO_BATCHES, stages), stages * slices
        measured = peak_of(real(PIPELINE, arguments_of(stages, MICRO_BATCHES), world, folder))
        peak, of_two = (peak_of(foreseen(PIPELINE, arguments_of(stages, number), world)) for number in (shown, 2))
        case = {"stages": stages, "tensor_parallel": slices, "micro_batches": MICRO_BATCHES}
        found = {"foreseen_peak": peak, "real_peak": measured, "difference": peak - measured}
        yield {**case, "foreseen_micro_batches": shown, **found, "foreseen_peak_of_two_micro_batches": of_two}


def main() -> None:
    """Runs all cases, and writes the result after each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--worlds", type=int, nargs="*", default=[2, 4])
    parser.add_argument("--stages", type=int, nargs="*", default=[0, 1, 2, 3])
    parser.add_argument("--precisions", nargs="*", default=["fp32", "bf16"])
    parser.add_argument("--pipelines", nargs="*", default=["2x1", "4x1", "2x2"], help="stages x tensor parallelism")
    parser.add_argument("--output", type=Path, default=RESULTS)
    options = parser.parse_args()
    found: dict[str, Any] = {"program": PROGRAM.name, "cases": [], "pipelines": []}
    with tempfile.TemporaryDirectory() as name:
        foreseen = Simulator(Path(name))
        try:
            for kind, rows in (("cases", transformers), ("pipelines", pipelines)):
                for row in rows(options, Path(name), foreseen):
                    found[kind].append(row)
                    print(json.dumps({**row, "differences_at_the_end_of_moments": None}), flush=True)
                    options.output.write_text(json.dumps(found, indent=1) + "\n")
        finally:
            foreseen.close()


if __name__ == "__main__":
    main()
