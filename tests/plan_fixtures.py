"""A plan by hand: its page can be tested without foreseeing anything."""

from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import (
    KINDS,
    MOMENTS,
    PLACES,
    Ask,
    ForeseenRun,
    MemoryEvent,
    Moment,
    Operation,
    Storage,
)
from zerotune.trial_lib.plan.plan_record import (
    PlannedArm,
    PlannedCount,
    PlannedDevices,
    PlannedRange,
    PlanPaths,
    PlanRecord,
    write_run,
)

MIB, GIB = 2**20, 2**30
MARKUP = "</script><script>document.title = 'broken'</script>"
SECRET = "hf_SECRETsecret123"
LAYERS = 32


class HandMadeRun:
    """A foreseen run that is written event by event."""

    def __init__(self) -> None:
        self.storages: list[Storage] = []
        self.events: list[MemoryEvent] = []
        self.moments: list[Moment] = []

    def moment(self, name: str, step: int, micro_batch: int = 0) -> None:
        """Begins a moment."""
        self.moments.append(Moment(MOMENTS.index(name), step, micro_batch, len(self.events), 0))

    def make(self, size: int, kind: str, place: str = "device") -> int:
        """Allocates a storage and returns its index."""
        self.storages.append(Storage(size, KINDS.index(kind), PLACES.index(place)))
        self.events.append(MemoryEvent(len(self.storages) - 1, 1))
        return len(self.storages) - 1

    def free(self, *storages: int) -> None:
        """Frees storages."""
        self.events += [MemoryEvent(storage, 0) for storage in storages]

    def run(self, **more: Any) -> ForeseenRun:
        """Returns the record."""
        events = {"storages": tuple(self.storages), "events": tuple(self.events), "moments": tuple(self.moments)}
        work = {"operations": (Operation(kind=0, dtype=0, flops=1e9, moved=1e6),), "dtypes": ("bfloat16",)}
        return ForeseenRun(**{"world": 8, "replicas": 8, "stage": 3, **events, **work, **more})


def run_by_hand(micro_batch: int = 4, accumulation: int = 1, offload: bool = False) -> ForeseenRun:
    """Returns two steps of a decoder of 8 billion parameters and 2,048 tokens, under stage 3 on 8 devices."""
    made = HandMadeRun()
    made.moment("initialize", 0)
    for _ in range(LAYERS):
        made.make(60 * MIB, "parameter")
    made.make(500 * MIB, "buffer")
    states = "pinned" if offload else "device"
    for step in (1, 2):
        made.moment("between", step)
        gradients = [made.make(60 * MIB, "gradient", states) for _ in range(LAYERS)]
        for number in range(accumulation):
            made.moment("load", step, number)
            batch = made.make(micro_batch * MIB, "input")
            made.moment("forward", step, number)
            saved = []
            for _ in range(LAYERS):
                gathered = made.make(480 * MIB, "buffer")
                saved += [made.make(micro_batch * size * MIB, "activation") for size in (32, 16, 16, 112, 64, 16)]
                made.free(made.make(micro_batch * 128 * MIB, "temporary"), gathered)
            logits = made.make(micro_batch * 500 * MIB, "activation")
            made.moment("backward", step, number)
            made.free(made.make(micro_batch * 1000 * MIB, "temporary"), logits)
            for _ in range(LAYERS):
                gathered = made.make(480 * MIB, "buffer")
                whole = made.make(480 * MIB, "gradient")
                for _ in range(6):
                    made.free(made.make(micro_batch * 112 * MIB, "temporary"), saved.pop())
                made.free(gathered, whole)
            made.free(batch)
        made.moment("update", step)
        if step == 1:
            for _ in range(LAYERS):
                made.make(360 * MIB, "optimizer", states)
        made.free(made.make(600 * MIB, "temporary", states), *gradients)
    made.moment("between", 3)
    return made.run(micro_batch=micro_batch, accumulation=accumulation)


def span(value: float, share: float = 0.2) -> PlannedRange:
    """Returns a range that reaches so far to both sides."""
    return PlannedRange(value=value, low=value * (1 - share), high=value * (1 + share))


def arm_by_hand(label: str, micro_batch: int, activation: float, states: float, **more: Any) -> PlannedArm:
    """Returns an arm. A micro-batch of 0 means that it does not fit; `activation` and `states` are in GiB."""
    memory = {
        "parameter": 0.2 * states * GIB,
        "gradient": 0.1 * states * GIB,
        "optimizer": 0.7 * states * GIB,
        "buffer": 1.9 * GIB,
        "activation": activation * GIB,
        "logits": 2 * GIB,
        "temporary": 4 * GIB,
        "overhead": 2.2 * GIB,
    }
    given: dict[str, Any] = {
        "label": label,
        "ds_config": {"train_batch_size": 128, "zero_optimization": {"stage": int(label[1])}},
        "fits": 0.94 if micro_batch else 0.0002,
        "largest_micro_batch": micro_batch + micro_batch // 2,
        "micro_batch": micro_batch or 1,
        "accumulation": 16 // (micro_batch or 1),
        "peak": span(sum(memory.values()), 0.07),
        "peak_moment": "backward",
        "memory": memory,
        "memory_bound": "activations" if micro_batch else "the states (parameters, gradients and the optimizer's)",
    }
    if micro_batch:
        given |= {
            "samples_per_s": span(17.3 * (1 + 0.02 * micro_batch)),
            "tokens_per_s": span(2048 * 17.3 * (1 + 0.02 * micro_batch)),
            "mfu": span(0.41),
            "cost": span(163.4),
            "time_bound": "computing",
            "seconds": {
                "compute": 2.9,
                "launches": 0.05,
                "gathering": 0.38,
                "reducing": 0.22,
                "exchanging": 0.0,
                "update": 0.09,
                "host_update": 0.6 if "offload" in label else 0.0,
                "transfers": 0.3 if "offload" in label else 0.0,
                "data": 0.004,
            },
            "hidden_s": 0.41,
        }
    return PlannedArm(**{**given, **more})


def devices_by_hand(device: str, memory: float, nodes: int = 1, **more: Any) -> PlannedDevices:
    """Returns the plan for eight devices on each host, with `memory` in GiB."""
    arms = (
        arm_by_hand("z3", 4, 31.5, 17.5, runs=("z3-mbs1-of8", "z3-mbs2-of8")),
        arm_by_hand("z2", 2, 15.0, 29.0, is_own=True),
        arm_by_hand("z1", 1, 6.5, 41.0),
        arm_by_hand("z3-offload-optimizer", 4, 31.5, 6.0, host=74 * GIB, runs=("z3-offload-optimizer-mbs4-of8",)),
        arm_by_hand("z3-offload-optimizer-offload-param", 16, 16.0, 2.0, host=90 * GIB),
        arm_by_hand("z0", 0, 6.5, 128.0),
        PlannedArm(label="z2-tp2", stopped="The program asks for the shape of a mask (train.py:31)."),
    )
    counts = tuple(
        PlannedCount(
            devices=number,
            label="z3" if number >= 4 else "z3-offload-optimizer",
            micro_batch=4 if number >= 4 else 0,
            accumulation=4,
            fits=0.94 if number >= 4 else 0.003,
            samples_per_s=span(2.3 * number**0.97 * memory / 79) if number >= 4 else None,
            peak=span((42 + 140 / number) * GIB, 0.07),
        )
        for number in (2**power for power in range(11))
    )
    given: dict[str, Any] = {
        "device": device,
        "nodes": nodes,
        "per_node": 8,
        "price": 2.99,
        "memory": memory * GIB,
        "usable": memory * GIB,
        "arms": arms,
        "best": "z3",
        "answer": f"On {8 * nodes} {device}: ZeRO 3, micro-batch 4, accumulation 4: foreseen 18.7 samples/s.",
        "why": ("Memory: 59.1 GiB of 79.1 GiB at the peak, in the backward pass. Activations take 57 % of it.",),
        "fewest": 4,
        "counts": counts,
    }
    return PlannedDevices(**{**given, **more})


def plan_by_hand(**more: Any) -> PlanRecord:
    """Returns a plan for two kinds of devices, whose program knows a secret and prints markup."""
    given: dict[str, Any] = {
        "plan_id": "llama-8b-20261126-150000-37dd",
        "name": "llama-8b",
        "command": ("deepspeed", "--num_gpus", "8", "train.py", "--deepspeed_config", "ds_config.json"),
        "model_dir": "/home/user/llama",
        "ds_config": {"train_batch_size": 128, "zero_optimization": {"stage": 2}, "hub": {"hf_token": SECRET}},
        "train_batch_size": 128,
        "parameters": 8_030_261_248,
        "tokens": 2048,
        "formats": ("bfloat16",),
        "devices": (
            devices_by_hand("a100-40gb", 39.4, 2, best="z3-offload-optimizer"),
            devices_by_hand("h100-80gb", 79.1),
        ),
        "best": 1,
        "answer": "On 8 h100-80gb: ZeRO 3, micro-batch 4, accumulation 4: foreseen 18.7 samples/s (14.9 to 22.4), "
        "38,265 tokens/s, MFU 41 %, 163 for a billion tokens. It fits with 94 %.",
        "best_command": "deepspeed --num_gpus 8 train.py --deepspeed_config best_ds_config.json",
        "asks": (
            Ask(asker=f"mask (train.py:31) {MARKUP}", question="item", answer="False", is_known=False, count=64),
            Ask(asker="clip_grad_norm_ (deepspeed/runtime/utils.py:321)", question="item", answer="1.0", is_known=True),
        ),
        "notes": (f"torch.compile is switched off, so memory is an upper bound. Logged in with {SECRET}.",),
        "versions": {"zerotune": "1.0", "deepspeed": "0.19.8", "torch": "2.13.0"},
        "seconds": 47.0,
        "shares": {"program as typed": 9.2, "arms": 35.1, "memory and time": 2.7},
        "peak_bytes": 3 * GIB,
    }
    return PlanRecord(**{**given, **more})


def plan_folder(folder: Path, record: PlanRecord | None = None) -> PlanPaths:
    """Writes a plan with its runs into a folder."""
    paths = PlanPaths(folder)
    folder.mkdir(parents=True, exist_ok=True)
    paths.record.write_text((record or plan_by_hand()).model_dump_json())
    paths.experiment.write_text(f"name: llama-8b\nenvironment:\n  environment_variables:\n    - HF_TOKEN={SECRET}\n")
    for size in (1, 2):
        write_run(paths.run(f"z3-mbs{size}-of8"), run_by_hand(size))
    write_run(paths.run("z3-offload-optimizer-mbs4-of8"), run_by_hand(4, accumulation=16, offload=True))
    return paths
