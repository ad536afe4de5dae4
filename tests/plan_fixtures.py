"""A plan by hand: what people are shown of one can be tested without foreseeing anything."""

from dataclasses import replace

from trial_lib.report.foreseen.plan_view import ArmView, AskView, CountView, PlanView, TargetView
from trial_lib.report.foreseen.step_line import HOST, step_line
from trial_lib.report.study_view import Interval, SettingChange
from trial_lib.wire.foreseen_run import KINDS, MOMENTS, PLACES, ForeseenRun, MemoryEvent, Moment, Storage

MIB, GIB = 2**20, 2**30
MARKUP = "</script><script>document.title = 'broken'</script>"


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

    def run(self) -> ForeseenRun:
        """Returns the record."""
        return ForeseenRun(
            world=8,
            storages=tuple(self.storages),
            events=tuple(self.events),
            moments=tuple(self.moments),
        )


def run_by_hand(layers: int = 32, accumulation: int = 1, offload: bool = False) -> ForeseenRun:
    """Returns two steps of a decoder under stage 3 on 8 devices: 8 billion parameters, 4 samples of 2,048 tokens."""
    made = HandMadeRun()
    made.moment("initialize", 0)
    for _ in range(layers):
        made.make(60 * MIB, "parameter")
    made.make(500 * MIB, "buffer")
    states = "pinned" if offload else "device"
    for step in (1, 2):
        made.moment("between", step)
        gradients = [made.make(60 * MIB, "gradient", states) for _ in range(layers)]
        for micro_batch in range(accumulation):
            made.moment("load", step, micro_batch)
            batch = made.make(2 * MIB, "input")
            made.moment("forward", step, micro_batch)
            saved = []
            for _ in range(layers):
                gathered = made.make(480 * MIB, "buffer")
                saved += [made.make(size * MIB, "activation") for size in (128, 64, 64, 448, 256, 64)]
                made.free(made.make(512 * MIB, "temporary"), gathered)
            logits = made.make(2000 * MIB, "activation")
            made.moment("backward", step, micro_batch)
            made.free(made.make(4000 * MIB, "temporary"), logits)
            for _ in range(layers):
                gathered = made.make(480 * MIB, "buffer")
                whole = made.make(480 * MIB, "gradient")
                for _ in range(6):
                    made.free(made.make(448 * MIB, "temporary"), saved.pop())
                made.free(gathered, whole)
            made.free(batch)
        made.moment("update", step)
        if step == 1:
            for _ in range(layers):
                made.make(360 * MIB, "optimizer", states)
        made.free(made.make(600 * MIB, "temporary", states), *gradients)
    made.moment("between", 3)
    return made.run()


def interval(value: float, share: float = 0.2) -> Interval:
    """Returns an interval that reaches so far to both sides."""
    return Interval(value, value * (1 - share), value * (1 + share))


def arm_by_hand(name: str, micro_batch: int, activation: float, states: float, **more: object) -> ArmView:
    """Returns an arm; `activation` and `states` are in GiB."""
    memory = {
        "parameter": 0.2 * states * GIB,
        "gradient": 0.1 * states * GIB,
        "optimizer": 0.7 * states * GIB,
        "buffer": 1.9 * GIB,
        "activation": activation * GIB,
        "temporary": 4 * GIB,
        "overhead": 2.2 * GIB,
    }
    speed = interval(17.3 * (1 + 0.02 * micro_batch)) if micro_batch else None
    arm = ArmView(
        name=name,
        fits=0.94 if micro_batch else 0.0002,
        micro_batch=micro_batch,
        accumulation=max(16 // micro_batch, 1) if micro_batch else 1,
        samples_per_s=speed,
        tokens_per_s=speed and Interval(*(2048 * each for each in (speed.value, speed.low, speed.high))),
        mfu=0.41 if micro_batch else None,
        cost=163.4 if micro_batch else None,
        why="memory: activations; time: compute" if micro_batch else "memory: optimizer states",
        peak=interval(sum(memory.values()), 0.07),
        memory=memory,
        seconds={
            "matrix products": 2.9,
            "attention": 0.61,
            "other kernels": 0.74,
            "gathers": 0.38,
            "reductions": 0.22,
            "optimizer": 0.09,
            "launches": 0.05,
            "data loading": 0.004,
        }
        if micro_batch
        else {},
        hidden_s=0.41 if micro_batch else 0.0,
    )
    return replace(arm, **more)  # type: ignore[arg-type]


def target_by_hand(name: str = "8 × h100-80gb", key: str = "h100-80gb-8", memory: float = 79.1) -> TargetView:
    """Returns a device with arms, a step and a curve."""
    offloaded = {"host": 74 * GIB}
    arms = (
        arm_by_hand("z3", 4, 33.5, 17.5, is_chosen=True),
        arm_by_hand("z3-checkpointing", 16, 18.0, 17.5),
        arm_by_hand("z2", 2, 17.0, 29.0, is_own=True),
        arm_by_hand("z1", 1, 8.5, 41.0),
        arm_by_hand("z3-offload-optimizer", 4, 33.5, 6.0, **offloaded),
        arm_by_hand("z3-offload-optimizer-offload-param-checkpointing", 16, 18.0, 2.0, **offloaded),
        arm_by_hand("z0", 0, 8.5, 128.0),
    )
    counts = tuple(
        CountView(
            devices=devices,
            arm="z3" if devices >= 4 else "",
            micro_batch=4 if devices >= 4 else 0,
            fits=0.94 if devices >= 4 else 0.003,
            samples_per_s=interval(2.3 * devices**0.97) if devices >= 4 else None,
            peak=interval((42 + 140 / devices) * GIB, 0.07),
        )
        for devices in (2**power for power in range(11))
    )
    return TargetView(
        key=key,
        name=name,
        devices=8,
        answer=f"On {name} it trains with z3 at micro-batch 4: 18.7 samples/s. The activations bound its memory.",
        memory=memory * GIB,
        arms=arms,
        fewest=4,
        counts=counts,
        line=step_line(run_by_hand()),
    )


def plan_by_hand() -> PlanView:
    """Returns a plan for two kinds of devices."""
    smaller = target_by_hand("2x8 × a100-40gb", "a100-40gb-16", 39.4)
    offloading = run_by_hand(accumulation=16, offload=True)
    chosen = tuple(replace(arm, is_chosen=arm.name == "z3-offload-optimizer") for arm in smaller.arms)
    smaller = replace(smaller, arms=chosen, line=step_line(offloading), host_line=step_line(offloading, HOST))
    return PlanView(
        name="llama-8b",
        headline="It trains fastest with ZeRO 3 and micro-batch 4 on 8 × h100-80gb: 18.7 samples/s, foreseen",
        targets=(target_by_hand(), smaller),
        counts_say="The global batch of 128 samples stays the same.",
        best_command="deepspeed --num_gpus 8 train.py --deepspeed_config best_ds_config.json",
        best_config={"train_batch_size": 128, "zero_optimization": {"stage": 3}},
        changes=(SettingChange("zero_optimization.stage", 2, 3),),
        unknown=(AskView(f"mask_is_empty (train.py:31) {MARKUP}", "item", "False", 64),),
        known=(
            AskView("clip_grad_norm_ (deepspeed/runtime/utils.py:321)", "item", "1.0", 2),
            AskView("has_overflow (deepspeed/runtime/zero/stage3.py:2204)", "item", "False", 2),
        ),
        notes=("torch.compile is switched off: memory is an upper bound.",),
        facts={"parameters": "8.03 billion", "command": "deepspeed --num_gpus 8 train.py", "ZeroTune": "1.0"},
        seconds=47.0,
    )
