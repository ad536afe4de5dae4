"""Measures what the training loop costs in a step over a hand-written DeepSpeed loop of the same model."""

import argparse
import json
import os
import socket
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deepspeed
import torch
from torch.utils.data import TensorDataset

from zerotune import DataLoader, DeepSpeedTrial, PyTorchCallback
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.orders import TrainingSpec
from zerotune.trial_lib.training.context import DeepSpeedTrialContext
from zerotune.trial_lib.training.distributed import DistributedContext, rank_device
from zerotune.trial_lib.training.loop import TrainingLoop, build_loaders

RESULT = Path(__file__).resolve().parents[1] / "results" / "training_loop.json"
CONFIG = {
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}},
    "zero_optimization": {"stage": 0},
    "steps_per_print": 10**9,
}
DATA = TensorDataset(torch.zeros(40_000, 1))
WARM_UP = 50


def engine(accumulation: int) -> Any:
    model = torch.nn.Linear(1, 1)
    config = {**CONFIG, "gradient_accumulation_steps": accumulation}
    return deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)[0]


class Clock(PyTorchCallback):
    """Reads the clocks when the training has reached its length, before it is validated."""

    def on_training_end(self) -> None:
        self.ended = clocks()


class Nothing(DeepSpeedTrial):
    """A model that does nothing to speak of."""

    def __init__(self, context: DeepSpeedTrialContext) -> None:
        self.context = context
        self.engine = context.wrap_model_engine(engine(context.get_hparam("accumulation")))
        self.clock = Clock()
        self.started: tuple[float, float] | None = None

    def build_callbacks(self) -> dict[str, PyTorchCallback]:
        return {"clock": self.clock}

    def build_training_data_loader(self) -> DataLoader:
        return DataLoader(DATA, batch_size=4, shuffle=True)

    def build_validation_data_loader(self) -> DataLoader:
        return DataLoader(TensorDataset(torch.zeros(4, 1)), batch_size=4)

    def evaluate_batch(self, dataloader_iter: Any, batch_idx: int) -> dict[str, Any]:
        return {"validation_loss": self.engine(*next(dataloader_iter)).mean()}

    def train_batch(self, dataloader_iter: Any, epoch_idx: int, batch_idx: int) -> Any:
        if batch_idx == WARM_UP and self.started is None:
            self.started = clocks()
        (inputs,) = self.context.to_device(next(dataloader_iter))
        loss = self.engine(inputs).mean()
        self.engine.backward(loss)
        self.engine.step()
        return {"loss": loss}


def clocks() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def by_hand(steps: int, accumulation: int) -> tuple[float, float]:
    """Returns the seconds of a step, by the wall clock and of the processor, of a loop without any comfort."""
    built = engine(accumulation)
    loader = torch.utils.data.DataLoader(DATA, batch_size=4, shuffle=True)
    batches = iter(loader)
    for step in range(WARM_UP + steps):
        if step == WARM_UP:
            started = clocks()
        for _ in range(accumulation):
            (inputs,) = next(batches)
            loss = built(inputs.to(built.device)).mean()
            built.backward(loss)
            built.step()
    return per_step(started, clocks(), steps)


def by_loop(steps: int, accumulation: int, report_period: int) -> tuple[float, float]:
    """Returns the same of the training loop, its reports included."""
    with tempfile.TemporaryDirectory() as folder:
        spec = TrainingSpec(
            "benchmark",
            hparams={"accumulation": accumulation},
            length={"batches": WARM_UP + steps},
            report_period=report_period,
            metrics=f"{folder}/metrics.jsonl",
        )
        context = DeepSpeedTrialContext(spec, DistributedContext.from_torch(), rank_device(0))
        trial = Nothing(context)
        TrainingLoop(trial, context, build_loaders(trial, context, with_validation=True), spec).run()
        return per_step(trial.started, trial.clock.ended, steps)


def per_step(started: tuple[float, float], ended: tuple[float, float], steps: int) -> tuple[float, float]:
    return (ended[0] - started[0]) / steps, (ended[1] - started[1]) / steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=400, help="counted in each run")
    parser.add_argument("--repeats", type=int, default=7, help="runs of each loop, in turn")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    os.environ |= rank_environment()
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    deepspeed.init_distributed(dist_backend="gloo")
    result = {
        f"accumulation {accumulation}": compare(arguments.steps, accumulation, arguments.repeats)
        for accumulation in (1, 8)
    }
    RESULT.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))


def compare(steps: int, accumulation: int, repeats: int) -> dict[str, Any]:
    """Returns the milliseconds of a step of each loop, and what ours costs more."""
    runs: dict[str, Callable[[], tuple[float, float]]] = {
        "by hand": lambda: by_hand(steps, accumulation),
        "the loop, a report every 100 steps": lambda: by_loop(steps, accumulation, 100),
        "the loop, a report every step": lambda: by_loop(steps, accumulation, 1),
    }
    measured: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            measured[name].append(run())
    medians = {
        name: {
            "wall_ms": 1e3 * statistics.median(wall for wall, _ in values),
            "processor_ms": 1e3 * statistics.median(processor for _, processor in values),
        }
        for name, values in measured.items()
    }
    hand = medians["by hand"]
    return {
        "steps": steps,
        "repeats": repeats,
        "ms_per_step": medians,
        "overhead_ms_per_step": {
            name: {clock: value - hand[clock] for clock, value in clocks.items()}
            for name, clocks in medians.items()
            if name != "by hand"
        },
    }


if __name__ == "__main__":
    main()
