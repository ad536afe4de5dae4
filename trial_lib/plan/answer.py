"""The answer of a plan in sentences: which configuration, what bounds it, and the fewest devices. Pure.

Every figure in them is foreseen, and the sentences say so.
"""

import math
from collections.abc import Collection, Mapping, Sequence

from zerotune.trial_lib.plan.plan_record import PlannedArm, PlannedDevices, PlannedLayout, PlannedRange
from zerotune.trial_lib.records.units import bytes_shown, percent

EQUAL = 1.01
"""Speeds that differ less are not told apart."""

SUREST, LEAST = 0.95, 0.2
"""The surest that a plan says of what fits, and of what does not.

Of public trainings that were foreseen to fit with over 95 %, 113 of 115 fitted, and of those with under 20 % 3 of 17
(`benchmarks/results/foreseen_memory.json`). On unseen ones a plan was wrong more often: docs/plan.md.
"""

STATES = ("parameter", "gradient", "optimizer")

MEMORY_WORDS = {
    "states": "states (parameters, gradients, optimizer)",
    "activation": "activations",
    "logits": "logits and the loss",
    "buffer": "DeepSpeed's buffers and gathered parameters",
    "input": "the batch",
    "temporary": "temporary storages",
    "overhead": "the allocator's cache and the context",
}
"""Kinds of memory in the words of an answer. `states` stands for `STATES`."""

TIME_WORDS = {
    "compute": ("computing", "compute"),
    "launches": ("launching many small operations", "launches"),
    "gathering": ("gathering parameters", "gathers"),
    "reducing": ("reducing gradients", "reduction"),
    "exchanging": ("waiting for activations of other devices", "exchange"),
    "update": ("the optimizer's update", "update"),
    "host_update": ("the optimizer's update on the host (Adam)", "host Adam"),
    "transfers": ("copies between device and host", "copies"),
    "disk": ("reading and writing NVMe drives", "NVMe"),
    "data": ("loading data", "data"),
}
"""Parts of a step in the words of an answer, and of a table."""

MOMENT_WORDS = {
    "initialize": "while DeepSpeed initialises",
    "load": "while a batch is loaded",
    "forward": "in the forward pass",
    "backward": "in the backward pass",
    "update": "in the optimizer's update",
    "between": "between the passes",
}


def grouped(memory: Mapping[str, float]) -> dict[str, float]:
    """Bytes by the keys of `MEMORY_WORDS`, largest first."""
    sums: dict[str, float] = {}
    for kind, size in memory.items():
        name = "states" if kind in STATES else kind
        sums[name] = sums.get(name, 0.0) + size
    return dict(sorted(((name, size) for name, size in sums.items() if size > 0), key=lambda each: -each[1]))


def memory_bound(memory: Mapping[str, float]) -> str:
    """What takes most of a device's memory, in words; empty if nothing is known."""
    return next((MEMORY_WORDS.get(name, name) for name in grouped(memory)), "")


def time_bound(seconds: Mapping[str, float]) -> str:
    longest = max(seconds, key=lambda part: seconds[part], default="")
    return TIME_WORDS.get(longest, (longest,))[0]


def answer_of(devices: PlannedDevices) -> str:
    hosts = "" if devices.nodes == 1 else f" ({devices.nodes} hosts of {devices.per_node})"
    on, arm = f"On {devices.count} {devices.device}{hosts}", devices.chosen
    if devices.contradiction:
        return (
            f"{on}: no answer, because the foreseen speeds contradict themselves. {devices.contradiction} "
            "The table has the memory alone."
        )
    if arm is None:
        return _nothing_fits(devices, on)
    figures = []
    if speed := arm.samples_per_s:
        figures.append(f"foreseen {_three(speed.value)} samples/s ({_three(speed.low)} to {_three(speed.high)})")
    if arm.tokens_per_s:
        figures.append(f"{arm.tokens_per_s.value:,.0f} tokens/s")
    if arm.mfu:
        figures.append(f"MFU {percent(round(arm.mfu.value, 2))}")
    if arm.cost:
        figures.append(f"{money(arm.cost.value)} for a billion tokens")
    return f"{on}: {configuration(arm)}: {', '.join(figures)}. It fits with {likelihood(arm.fits)}."


def configuration(arm: PlannedArm) -> str:
    """An arm in words, such as `ZeRO 2, micro-batch 8, accumulation 4`."""
    plain = arm.label.removesuffix("".join(f"-{word}" for word in arm.switches))
    stage, *more = plain.split("-", 1)
    said = [more[0].replace("-offload", " and offload").replace("-", " ")] if more else []
    with_more = " with " + ", ".join([*said, *arm.switches.values()]) if said or arm.switches else ""
    return f"ZeRO {stage.removeprefix('z')}{with_more}, micro-batch {arm.micro_batch}, accumulation {arm.accumulation}"


def why_of(devices: PlannedDevices) -> tuple[str, ...]:
    """What bounds memory and time of the answer, or of the arm that is nearest to fit."""
    arm = devices.chosen or nearest_to_fit(devices.arms)
    if arm is None:
        return ()
    sentences = []
    if arm.peak is not None and arm.memory:
        total = sum(arm.memory.values()) or 1.0
        parts = [f"{bytes_shown(size)} {MEMORY_WORDS.get(name, name)}" for name, size in grouped(arm.memory).items()]
        largest = next(iter(grouped(arm.memory).values()))
        moment = MOMENT_WORDS.get(arm.peak_moment, MOMENT_WORDS["between"])
        sentences.append(
            f"Memory: {bytes_shown(arm.peak.value)} of {bytes_shown(devices.usable)} at the peak, "
            f"{moment}: {_listed(parts[:4])}. The largest part is {_share(largest, total)} of it."
        )
    if arm.host > 0.01 * (devices.host_memory or 0.0):
        room = "" if devices.host_memory is None else f" of {bytes_shown(devices.host_memory)}"
        sentences.append(f"Host: each rank keeps {bytes_shown(arm.host)}{room} in its host's memory.")
    if arm.seconds:
        total = sum(arm.seconds.values()) or 1.0
        longest = sorted(arm.seconds.items(), key=lambda each: -each[1])
        parts = [
            f"{TIME_WORDS.get(part, (part,))[0]} {_share(size, total)}"
            for part, size in longest
            if size >= 0.01 * total
        ]
        sentences.append(f"Time: a step takes {total:.3g} s, of which {_listed(parts[:4])}.")
    if is_bound_by_loading(arm):
        sentences.append(
            f"Loading binds: with all data at hand it would be {_three(arm.without_loading or 0.0)} samples/s. It was "
            "measured on this host. Other workers or data there change it."
        )
    return tuple(sentences)


def is_bound_by_loading(arm: PlannedArm) -> bool:
    """Whether the devices wait for data in a tenth of a step or more."""
    return arm.without_loading is not None and arm.seconds.get("data", 0.0) >= 0.1 * sum(arm.seconds.values())


def fewest_sentence(devices: PlannedDevices) -> str:
    if devices.fewest is None:
        most = max((each.devices for each in devices.counts), default=devices.count)
        return f"It trains on no number of {devices.device} up to {most:,}."
    if devices.fewest == 1:
        return f"It trains on a single {devices.device} already."
    found = next((each.other_batch for each in devices.counts if each.devices == devices.fewest), None)
    batch = "" if found is None else f", with a global batch of {found:,}, because they cannot divide yours"
    return f"The fewest {devices.device} on which it trains: {devices.fewest:,}{batch}."


def plan_answer(devices: Sequence[PlannedDevices], best: int | None) -> str:
    """`best` is the index of the answer; None if nothing fits anywhere."""
    if best is not None:
        return f"{answer_of(devices[best])}{_faster(devices, best)}"
    if len(devices) == 1 or any(each.contradiction for each in devices):
        return " ".join(map(answer_of, devices))
    return f"Nothing fits on {_listed([each.label for each in devices])}. {fewest_sentence(devices[0])}"


def _faster(devices: Sequence[PlannedDevices], best: int) -> str:
    # Which devices are faster than those with the cheapest tokens; empty if none are.
    speeds = {
        each.label: arm.samples_per_s.value
        for each in devices
        if (arm := each.chosen) is not None and arm.samples_per_s is not None
    }
    fastest = max(speeds, key=lambda label: speeds[label], default=devices[best].label)
    if speeds.get(fastest, 0.0) <= EQUAL * speeds.get(devices[best].label, 0.0):
        return ""
    own = devices[best].chosen
    alike = [
        each.label
        for each in devices
        if own is not None and own.cost is not None and (arm := each.chosen) is not None and arm is not own
        if arm.cost is not None and not are_apart(own.cost, arm.cost, own.apart, arm.apart)
    ]
    least = f" It costs least{f', but its price is not told apart from that of {_listed(alike)}' if alike else ''}."
    return f"{least} {fastest} is faster, with {_three(speeds[fastest])} samples/s."


def are_apart(one: PlannedRange, other: PlannedRange, *apart: float) -> bool:
    """Whether two foreseen figures differ by more than is unknown of them, each `PlannedStep.apart`.

    What is unknown of all steps alike makes no difference. `benchmarks/foresee/public_gpus/ratios.py` shows how far off
    foreseen ratios are.
    """
    if min(one.value, other.value) <= 0:
        return one.value != other.value
    return abs(math.log(one.value / other.value)) > math.hypot(*map(math.log, apart))


def best_of(devices: Sequence[PlannedDevices], in_time: Collection[str] = ()) -> int | None:
    """The index of the cheapest tokens if all that fit have a price, else of the most samples a second.

    If some devices end the training `in_time`, by their labels, it is one of these.
    """
    fitting = [(index, arm) for index, each in enumerate(devices) if (arm := each.chosen) is not None]
    fitting = [each for each in fitting if devices[each[0]].label in in_time] or fitting
    if not fitting:
        return None
    costs = [(arm.cost.value, index) for index, arm in fitting if arm.cost is not None]
    if len(costs) == len(fitting):
        return min(costs)[1]
    return max(fitting, key=lambda each: each[1].samples_per_s.value if each[1].samples_per_s else 0.0)[0]


def nearest_to_fit(arms: Sequence[PlannedArm]) -> PlannedArm | None:
    """The arm that needs least memory; None if none was foreseen."""
    seen = [arm for arm in arms if arm.peak is not None]
    return min(seen, key=lambda arm: (-round(arm.fits, 2), arm.peak.value if arm.peak else 0.0), default=None)


def likelihood(share: float) -> str:
    """A probability for people, and none that is surer than measurements have shown."""
    if share > SUREST:
        return f"over {percent(SUREST)}"
    return f"under {percent(LEAST)}" if share < LEAST else percent(round(share, 2))


def money(amount: float) -> str:
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"


_SIZES = {"TP": "tensor", "SP": "sequence", "PP": "pipeline", "EP": "expert", "DP": "replicas"}


def layout_cells(layouts: Sequence[PlannedLayout]) -> list[dict[str, str]]:
    """The cells of the table of layouts by their columns, but for the last two. A size that none has gets no column."""
    sizes = {column: name for column, name in _SIZES.items() if any(getattr(each, name) > 1 for each in layouts)}
    return [
        {
            **{column: str(getattr(each, name)) for column, name in sizes.items()},
            "ZeRO": str(each.zero_stage),
            "recomputes": f"{each.recomputed} of {each.layers}" if each.recomputed else "nothing",
            "batch": f"{each.micro_batch} x {each.accumulation}",
            "fits": likelihood(each.fits).replace("over ", ">").replace("under ", "<").replace(" ", ""),
        }
        for each in layouts
    ]


def _nothing_fits(devices: PlannedDevices, on: str) -> str:
    stopped = [arm for arm in devices.arms if arm.stopped]
    nearest = nearest_to_fit(devices.arms)
    if nearest is None or nearest.peak is None:
        return f"{on}: {stopped[0].stopped}" if stopped else f"{on}: nothing was foreseen."
    lacks = f"it needs {bytes_shown(nearest.peak.value)} of {bytes_shown(devices.usable)}"
    if nearest.peak.value <= devices.usable and devices.host_memory is not None and nearest.host > devices.host_memory:
        lacks = f"each rank keeps {bytes_shown(nearest.host)} on a host with {bytes_shown(devices.host_memory)} for it"
    return f"{on}: nothing fits. The nearest is {configuration(nearest)}: {lacks}. {fewest_sentence(devices)}"


def _three(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def _share(part: float, whole: float) -> str:
    return percent(round(part / whole, 2))


def _listed(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"
