"""Hours and price of the whole training, on each kind and number of devices. Pure.

Hours are those of optimizer steps. Their intervals are those of the foreseen speeds, and prices have the same.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.plan.answer import EQUAL, are_apart, configuration, money
from zerotune.trial_lib.plan.plan_record import (
    GIVE_LENGTH,
    PlannedArm,
    PlannedDevices,
    PlannedRange,
    PlannedTraining,
    TrainingLength,
    TrainingRow,
)
from zerotune.trial_lib.records.switches import shown_switch, switches_of

ASKED, FEWEST, CHEAPEST, OTHER = "asked", "fewest", "cheapest", "other training"

_HOUR_S = 3600.0
_ALIKE = 1.1  # lengths of samples differ from batch to batch


def length_of(program: Mapping[str, Any]) -> TrainingLength | None:
    """What the program's Trainer would do, by its findings (`ProgramProfile` as JSON); None if it has none."""
    if steps := program.get("whole_steps"):
        return TrainingLength(steps, "step", "its Trainer")
    if epochs := program.get("whole_epochs"):
        return TrainingLength(epochs, "epoch", "its Trainer")
    return None


def whole_training(
    devices: Sequence[PlannedDevices],
    runs: Mapping[str, ForeseenRun],
    typed: ForeseenRun,
    length: TrainingLength | None,
    within: float | None,
) -> PlannedTraining | None:
    """`within` is the hours in which it has to end. None if nothing asks for it and the program tells no length."""
    batch = typed.micro_batch * typed.accumulation * typed.replicas
    samples = None if length is None else length.samples(typed, batch)
    if length is None or samples is None:
        is_asked = length is not None or within is not None or any(each.price is not None for each in devices)
        return PlannedTraining(missing=_missing(length, typed)) if is_asked else None
    rows: dict[tuple[str, int, str], TrainingRow] = {}
    for each in devices:
        for row in _rows(each, runs, typed, length, within):
            # Two numbers of one kind may be asked for.
            known = rows.setdefault((row.device, row.count, row.label), row)
            marks = tuple(dict.fromkeys((*known.marks, *row.marks)))
            rows[row.device, row.count, row.label] = known.model_copy(update={"marks": marks})
    best = _best([*rows.values()], within)
    found = [row.model_copy(update={"is_best": row is best}) for row in rows.values()]
    found.sort(key=lambda row: (row.price or row.hours).value)
    told = f"{length}, by {length.source}"
    if length.unit != "sample":
        told += f": {samples:,.0f} samples" + (f" of {typed.tokens:,} tokens" if typed.tokens else "")
    return PlannedTraining(length=told, within=within, rows=tuple(found), answer=_answer(found, devices, within))


def _missing(length: TrainingLength | None, typed: ForeseenRun) -> str:
    if length is not None:
        lacks = "its batches show no tokens" if length.unit == "token" else "its data loader has no length"
        return f"The hours of {length} are not known, because {lacks}. Give another length, by {GIVE_LENGTH}."
    epoch = (typed.program.get("samples_per_epoch") or 0) * typed.replicas
    has = f" An epoch of its data has {epoch:,} samples." if epoch else ""
    return f"Hours of the whole training are not known, because the program tells no length.{has} Give {GIVE_LENGTH}."


def _rows(
    devices: PlannedDevices,
    runs: Mapping[str, ForeseenRun],
    typed: ForeseenRun,
    length: TrainingLength,
    within: float | None,
) -> list[TrainingRow]:
    arms = {arm.label: arm for arm in devices.arms}
    batch = typed.micro_batch * typed.accumulation * typed.replicas

    def row(arm: PlannedArm, count: int, known: Any) -> TrainingRow | None:
        # A switch may change the samples of an epoch, their tokens, and what is trained.
        own = next((runs[name] for name in arm.runs if name in runs), typed) if arm.switches else typed
        samples = length.samples(own, batch)
        if known.samples_per_s is None or samples is None:
            return None
        low, value, high = (samples / _HOUR_S / getattr(known.samples_per_s, end) for end in ("high", "value", "low"))
        hours = PlannedRange(value=value, low=low, high=high)
        is_other = not is_same_training(own, typed) or getattr(known, "other_batch", None) is not None
        return TrainingRow(
            device=devices.device,
            devices=devices.label if count == devices.count else _label(devices, count),
            count=count,
            label=arm.label,
            switches=arm.switches,
            micro_batch=known.micro_batch,
            accumulation=known.accumulation,
            fits=known.fits,
            hours=hours,
            price=None if devices.price is None else hours.times(devices.price * count),
            apart=known.apart,
            is_other=is_other,
            marks=(*((ASKED,) if count == devices.count else ()), *((OTHER,) if is_other else ())),
        )

    counted = [row(arms[each.label], each.devices, each) for each in devices.counts if each.label in arms]
    found = _marked([each for each in counted if each is not None], within)
    # The other settings of the program's switches, at the number that is asked for.
    seen = {str(devices.chosen.switches)} if devices.chosen else set()
    others = {str(arm.switches): row(arm, devices.count, arm) for arm in reversed(devices.arms) if arm.is_likely}
    return [*found, *(each for switches, each in others.items() if each is not None and switches not in seen)]


def is_same_training(run: ForeseenRun, typed: ForeseenRun) -> bool:
    """Whether a switch leaves the model, its trained weights and the length of samples as they are typed."""
    pairs = (*_sizes_of(run, typed), (run.trainable, typed.trainable))
    return all(max(pair) <= _ALIKE * min(pair) for pair in pairs)


def _label(devices: PlannedDevices, count: int) -> str:
    # Larger numbers of the counts are whole hosts.
    of_host = int(devices.figures.get("per_host", count))
    return f"{devices.device}:{count}" if count <= of_host else f"{devices.device}:{count // of_host}x{of_host}"


def _marked(rows: Sequence[TrainingRow], within: float | None) -> list[TrainingRow]:
    # The rows of one kind. Another training is compared with itself alone.
    same = [row for row in rows if not row.is_other] or rows
    in_time = [row for row in same if within is None or row.hours.value <= within]
    marks: dict[str, TrainingRow] = {}
    if in_time:
        marks[FEWEST] = min(in_time, key=_fewest)
        if in_time[0].price is not None:
            least = min(map(_price, in_time))
            marks[CHEAPEST] = min((row for row in in_time if _price(row) <= EQUAL * least), key=_fewest)
    shown = [(row, (*row.marks, *(mark for mark, marked in marks.items() if marked is row))) for row in rows]
    # Numbers with another global batch have a place in the picture alone.
    return [row.model_copy(update={"marks": () if own == (OTHER,) else own}) for row, own in shown]


def _price(row: TrainingRow) -> float:
    return math.inf if row.price is None else row.price.value


def _fewest(row: TrainingRow) -> tuple[int, float]:
    return row.count, row.hours.value


def _best(rows: Sequence[TrainingRow], within: float | None) -> TrainingRow | None:
    priced = [row for row in rows if CHEAPEST in row.marks]
    if priced or within is None:
        return min(priced, key=_price, default=None)
    return min((row for row in rows if FEWEST in row.marks), key=_fewest, default=None)


def _answer(rows: Sequence[TrainingRow], devices: Sequence[PlannedDevices], within: float | None) -> str:
    best = next((row for row in rows if row.is_best), None)
    ends = "" if within is None else f" on which it ends within {_hours(within)} h"
    if best is None:
        return "" if within is None else f"Nothing foreseen here ends within {_hours(within)} h."
    what = "cheapest devices" if best.price is not None else "fewest devices"
    hours, low, high = map(_hours, (best.hours.value, best.hours.low, best.hours.high))
    said = [f"The {what}{ends}: {best.devices}, {_configuration(best)}: {hours} h ({low} to {high}){_for(best)}."]
    alike = [
        row
        for row in rows
        if CHEAPEST in row.marks and not row.is_best and row.price is not None and best.price is not None
        if not are_apart(row.price, best.price, row.apart, best.apart)
    ]
    if alike:
        listed = ", ".join(f"{row.devices} ({money(_price(row))})" for row in alike)
        said.append(f"In price it is not told apart from {listed}.")
    if within is not None and best.hours.high > within:
        sure = [row for row in rows if row.hours.high <= within and not row.is_other]
        surely = min(sure, key=_price if best.price is not None else _fewest, default=None)
        more = "nothing foreseen here does" if surely is None else f"{surely.devices} does{_for(surely)}"
        said.append(f"Its interval ends after {_hours(within)} h. Within its whole interval {more}.")
    if best.devices not in {each.label for each in devices}:
        said.append(f"For its command plan with --on {best.devices}.")
    return " ".join(said)


def _configuration(row: TrainingRow) -> str:
    arm = PlannedArm(label=row.label, switches=row.switches, micro_batch=row.micro_batch, accumulation=row.accumulation)
    return configuration(arm)


def _for(row: TrainingRow) -> str:
    price = row.price
    return "" if price is None else f" for {money(price.value)} ({money(price.low)} to {money(price.high)})"


def _hours(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2g}"


def largest_that_fit(devices: PlannedDevices, runs: Mapping[str, ForeseenRun]) -> tuple[str, ...]:
    """A sentence for each switch whose values differ in size: the longest sequence, or the largest model, that fits."""
    places: dict[str, dict[Any, list[PlannedArm]]] = {}
    for arm in devices.arms:
        for place, value in switches_of(arm.ds_config or arm.knobs).items():
            if not isinstance(value, bool):
                places.setdefault(place, {}).setdefault(value, []).append(arm)
    said = []
    for place, arms in places.items():
        size = _sizes(arms, runs)
        if len(arms) < 2 or size is None:
            continue
        fitting = [value for value in size if any(arm.is_likely for arm in arms[value])]
        most = max(fitting, key=size.__getitem__, default=None)
        of = f"of {len(arms)} that were foreseen"
        if most is None:
            said.append(f"None of the {len(arms)} values of {place} fits.")
        else:
            parameters = "" if isinstance(most, int | float) else f" ({size[most]:,.0f} parameters)"
            said.append(f"The largest that fits, {of}: {shown_switch(place, most)}{parameters}.")
    return tuple(said)


def _sizes(arms: Mapping[Any, Sequence[PlannedArm]], runs: Mapping[str, ForeseenRun]) -> dict[Any, float] | None:
    # Names are models, if these differ in parameters. Numbers are their own size, if model or samples follow them.
    found = {value: [runs[name] for arm in of for name in arm.runs if name in runs] for value, of in arms.items()}
    known = [of_value[0] for of_value in found.values() if of_value]
    if all(isinstance(value, int | float) for value in arms):
        follows = any(max(a, b) > _ALIKE * min(a, b) for one in known for a, b in _sizes_of(one, known[0]))
        return {value: float(value) for value in arms} if follows else None
    sizes = {value: float(max((run.parameters for run in of), default=0)) for value, of in found.items()}
    return sizes if len({*sizes.values()}) == len(sizes) and all(sizes.values()) else None


def _sizes_of(one: ForeseenRun, other: ForeseenRun) -> tuple[tuple[int, int], ...]:
    return (one.parameters, other.parameters), (one.tokens or 0, other.tokens or 0)
