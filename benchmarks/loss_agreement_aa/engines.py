"""Trains small models on two ranks of real DeepSpeed engines, many one after another, with or without a planted fault.

`torchrun`-like processes of this module read cases from a file and write the record of each.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RANKS = 2
SAMPLES = 8  # of a rank in an optimizer step
FAULTS = (
    "learning rate 0",
    "learning rate halved",
    "wrong sign",
    "a module frozen",
    "gradients of a rank lost",
    "a micro-batch dropped",
    "loss scale wrong",
    "gradients overwritten",
    "master weights in bf16",
    "clipped by shard",
)


@dataclass(frozen=True)
class Case:
    """One training of a few steps."""

    model: str
    numbers: str = "fp32"  # or `bf16`, `fp16`
    optimizer: str = "AdamW"  # or `momentum`, or another one of torch's
    rate: float = 1e-3
    clips: float = 0.0
    warms_up: bool = False
    stage: int = 0
    micro_batch: int = SAMPLES
    bucket: int = 1_000_000
    offloads: bool = False
    scale_power: int = 8
    data_seed: int = 0
    seed: int = 1
    rounding: float | None = None
    fault: str = ""
    steps: int = 5
    samples: int = SAMPLES  # of a rank in an optimizer step
    adds_up: str = ""  # the format that gradients add up in; DeepSpeed's own if empty

    def config(self) -> dict[str, Any]:
        factor = {"learning rate 0": 0.0, "learning rate halved": 0.5}.get(self.fault, 1.0)
        zero: dict[str, Any] = {
            "stage": self.stage,
            "reduce_bucket_size": self.bucket,
            "allgather_bucket_size": self.bucket,
        }
        if self.offloads:
            zero["offload_optimizer"] = {"device": "cpu"}
        config: dict[str, Any] = {
            "train_micro_batch_size_per_gpu": self.micro_batch,
            "gradient_accumulation_steps": self.samples // self.micro_batch,
            "zero_optimization": zero,
            "zero_allow_untested_optimizer": True,
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": self.clips,
            "steps_per_print": 10**9,
        }
        if self.warms_up:
            config["scheduler"] = {
                "type": "WarmupLR",
                "params": {"warmup_min_lr": 0.0, "warmup_max_lr": self.rate * factor, "warmup_num_steps": 10},
            }
        if self.numbers == "bf16":
            config["bf16"] = {"enabled": True}
        if self.adds_up:
            config["data_types"] = {"grad_accum_dtype": self.adds_up}
        if self.numbers == "fp16":
            config["fp16"] = {"enabled": True, "initial_scale_power": self.scale_power, "hysteresis": 1}
        return config

    def optimizer_of(self, parameters: Any) -> Any:
        import torch

        rate = self.rate * {"learning rate 0": 0.0, "learning rate halved": 0.5}.get(self.fault, 1.0)
        maximize = self.fault == "wrong sign"
        if self.optimizer in ("SGD", "momentum"):
            momentum = 0.9 if self.optimizer == "momentum" else 0.0
            return torch.optim.SGD(parameters, rate, momentum=momentum, maximize=maximize)
        return getattr(torch.optim, self.optimizer)(parameters, rate, maximize=maximize)


class Recorded:
    """Watches an engine as a trial's probe does."""

    def __init__(self, engine: Any, case: Case) -> None:
        from zerotune.trial_lib.messages.measurement import Arrival
        from zerotune.trial_lib.rank.device import device_of
        from zerotune.trial_lib.rank.engine_watch import EngineWatch
        from zerotune.trial_lib.rank.first_steps import FirstSteps

        self._case = case
        self._steps = FirstSteps(weighs=True)
        self._steps.begin(engine)
        self.watch = EngineWatch(engine, device_of(engine.device), case.micro_batch, self, False, Arrival())
        self._has_begun = False

    def begins(self) -> None:
        # The batches here are numbers of samples and no tensors, so the watch sees none arrive.
        if not self._has_begun:
            self._has_begun = True
            self._steps.training_begins(self.watch.engine, self._case.rounding)

    def first_batch_arrived(self, sizes: tuple[int, ...], tokens: int | None) -> None: ...

    def other_engine_stepped(self, engine: Any) -> None: ...

    def optimizer_step_begins(self) -> None:
        self._steps.step_begins(self.watch.engine)

    def optimizer_step_ended(self, applied: bool) -> None:
        self._steps.add(self.watch.take_loss(), self.watch.engine, applied)

    def record(self) -> dict[str, Any]:
        found = self._steps.over_ranks(self.watch.engine)
        change = found["weight_change"]
        return {**found, "weight_change": None if change is None else asdict(change)}


def _plant(engine: Any, case: Case, rank: int) -> None:
    # Plants a fault in an engine.
    import torch

    backward, accumulation, count = engine.backward, case.samples // case.micro_batch, [0]

    def factor(place: int) -> float:
        return {
            "gradients of a rank lost": 0.0 if rank else 1.0,
            "a micro-batch dropped": 0.0 if place == accumulation - 1 else 1.0,
            "loss scale wrong": 4.0,
            "gradients overwritten": 1.0 if place == accumulation - 1 else 0.0,
        }.get(case.fault, 1.0)

    def faulty(loss: Any, *args: Any, **kwargs: Any) -> Any:
        place, count[0] = count[0] % accumulation, count[0] + 1
        backward(loss * factor(place), *args, **kwargs)
        # The program shows the loss that it means.
        return loss / accumulation

    engine.backward = faulty
    optimizer = engine.optimizer
    if case.fault == "clipped by shard":
        original = optimizer.unscale_and_clip_grads

        def by_shard(gradients: Any, norm: Any) -> Any:
            if isinstance(gradients, int):
                flat = optimizer.fp32_partitioned_groups_flat[gradients].grad
                return original(gradients, torch.linalg.vector_norm(flat.float()))
            return original(gradients, torch.linalg.vector_norm(torch.cat([each.float() for each in gradients])))

        optimizer.unscale_and_clip_grads = by_shard

    if case.fault == "master weights in bf16":
        inner = optimizer.optimizer
        update = inner.step

        def narrow_update(*args: Any, **kwargs: Any) -> Any:
            result = update(*args, **kwargs)
            for group in inner.param_groups:
                for kept in group["params"]:
                    kept.data.copy_(kept.data.bfloat16())
            return result

        inner.step = narrow_update


def trained(case: Case) -> dict[str, Any]:
    import deepspeed
    import torch

    from benchmarks.loss_agreement_aa.models import MODELS

    rank = int(os.environ["RANK"])
    torch.manual_seed(case.seed)
    model = MODELS[case.model]()
    if case.fault == "a module frozen":
        trainable = [
            module for module in model.inner.children() if any(each.requires_grad for each in module.parameters())
        ]
        trainable[len(trainable) // 2].requires_grad_(False)
    optimizer = case.optimizer_of([each for each in model.parameters() if each.requires_grad])
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=case.config())
    _plant(engine, case, rank)
    recorded = Recorded(engine, case)
    try:
        for step in range(case.steps):
            first = (step * RANKS + rank) * case.samples
            for place in range(0, case.samples, case.micro_batch):
                numbers = list(range(first + place, first + place + case.micro_batch))
                recorded.begins()
                loss = engine(numbers, case.data_seed)
                engine.backward(loss)
                engine.step()
        return recorded.record()
    finally:
        recorded.watch.end()
        engine.destroy()


def _work(cases: Path, results: Path) -> None:
    import logging

    import deepspeed
    import torch
    from deepspeed.accelerator import get_accelerator

    from zerotune.trial_lib.rank.session import _forget_models

    # DeepSpeed refuses fp16 on processors, which compute it all the same.
    type(get_accelerator()).is_fp16_supported = lambda accelerator: True
    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    deepspeed.init_distributed("gloo")
    with results.open("a") as file:
        for line in cases.read_text().splitlines():
            case, started = Case(**json.loads(line)), time.monotonic()
            record: dict[str, Any] = {}
            try:
                record = trained(case)
            except (AssertionError, AttributeError, RuntimeError, TypeError, ValueError) as error:
                # All ranks refuse a configuration alike.
                record = {"error": f"{type(error).__name__}: {error}"}
            _forget_models()
            if os.environ["RANK"] == "0":
                seconds = round(time.monotonic() - started, 3)
                file.write(json.dumps({"case": asdict(case), "seconds": seconds, **record}) + "\n")
                file.flush()


def run(cases: Sequence[Case], results: Path) -> None:
    """Appends the record of each case, from two ranks, to a file, so that what is killed can go on."""
    with tempfile.TemporaryDirectory(prefix="engines-") as folder:
        work = Path(folder, "cases.jsonl")
        work.write_text("".join(json.dumps(asdict(case)) + "\n" for case in cases))
        with contextlib.ExitStack() as stack:
            ranks = []
            for rank in range(RANKS):
                environment = {
                    **os.environ,
                    **{"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(RANKS), "OMP_NUM_THREADS": "1"},
                    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29611", "DEEPSPEED_LOG_LEVEL": "error"},
                }
                command = [sys.executable, "-m", "benchmarks.loss_agreement_aa.engines", str(work), str(results)]
                log = stack.enter_context(Path(folder, f"log{rank}").open("w"))
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
            codes = [rank.wait() for rank in ranks]
            if any(codes):
                raise RuntimeError(Path(folder, "log0").read_text()[-3000:])


if __name__ == "__main__":
    _work(Path(sys.argv[1]), Path(sys.argv[2]))
