"""The arms of a plan: the search space's ZeRO stages and offloads, and the batch that each of them keeps."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import GROUPS, Layout, group_sizes, ranks_of_a_replica
from zerotune.trial_lib.deepspeed_config.overrides import (
    ACCUMULATION,
    MICRO_BATCH,
    TRAIN_BATCH,
    overwrite_deepspeed_config,
    resolve_batch,
)
from zerotune.trial_lib.messages.errors import InputError
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.turned import compiles, is_turned
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.switches import PROGRAM, is_foreseeable, is_switch, place_of, shown_switch, switches_of
from zerotune.trial_lib.search.arms import RequestedKnob, build_space, foreseen_surroundings, left_out_of_space
from zerotune.trial_lib.search.catalogue import is_coarse
from zerotune.trial_lib.search.knobs import STAGE, Arm, get_knob, leaves, set_knob, switch_word
from zerotune.trial_lib.search.sizes import BatchPolicy
from zerotune.trial_lib.search.zero_settings import arm_key

_COARSE = (STAGE, "zero_optimization.offload_optimizer", "zero_optimization.offload_param")
_PERMISSIONS = ("zero_force_ds_cpu_optimizer", "zero_allow_untested_optimizer")


@dataclass(frozen=True)
class PlanArm:
    label: str  # such as `z3-offload-optimizer`
    # Its settings, each fine one at its best guess, in the shape of the DeepSpeed configuration
    knobs: Mapping[str, Any]
    # Whether the user's configuration is of this arm. Its knobs then change nothing: they are empty, or have the
    # program's own switches.
    is_own: bool = False
    # The program's switches that differ from the user's, as people read them, by their words in the label
    switches: Mapping[str, str] = field(default_factory=dict)

    def candidate(self, policy: BatchPolicy, micro_batch: int, ranks: int) -> Candidate:
        return Candidate(
            knobs=dict(self.knobs),
            micro_batch_size=micro_batch,
            gradient_accumulation_steps=policy.accumulation(micro_batch),
            slots=ranks,
            data_parallel_size=policy.data_parallel_size,
        )


def planned_arms(
    typed: ForeseenRun,
    base_config: Mapping[str, Any],
    stages: Iterable[int],
    requests: Sequence[RequestedKnob] = (),
    device: str = "cuda",
) -> tuple[PlanArm, ...]:
    """The arms to foresee, the user's own first.

    The section `program` of `base_config` has the switches in the user's configuration. A requested switch stays as
    typed unless it `is_planned`.
    """
    turnable: Mapping[str, Sequence[Any]] = typed.program.get("turnable", {})
    requests = _planned_requests(typed, base_config, requests)
    varied = [place_of(each.path) for each in requests if is_switch(each.path)]
    switches = {place: turnable[place][0] for place in varied if place in turnable} | {
        place: value for place, value in switches_of(base_config).items() if place in varied and value is not None
    }
    own_switches = {PROGRAM: switches} if switches else {}
    base_config = {**{key: value for key, value in base_config.items() if key != PROGRAM}, **own_switches}
    here = foreseen_surroundings(typed, base_config, device)
    asked = {request.path for request in requests if is_coarse(request.path)}
    own = arm_key(overwrite_deepspeed_config(base_config, {}))
    found = [PlanArm(own_label(base_config), own_switches, is_own=True)]
    seen = {own}
    for each in build_space(stages, here, requests, catalogue=True).arms:
        config = overwrite_deepspeed_config(base_config, each.knobs)
        key, arm = arm_key(config), _without_groups(each)
        # The catalogue has smaller groups than the user's as well.
        if key not in seen and Layout.of(config) == Layout.of(base_config) and _is_asked_for(arm, asked):
            seen.add(key)
            found.append(_with_label(arm, switches))
    return tuple(found)


def requests_without_arms(
    typed: ForeseenRun,
    base_config: Mapping[str, Any],
    stages: Iterable[int],
    requests: Sequence[RequestedKnob],
    device: str = "cuda",
) -> tuple[str, ...]:
    """A sentence for each request that no arm comes of, for each unknown one, and for ruled-out stages."""
    here = foreseen_surroundings(typed, base_config, device)
    planned = _planned_requests(typed, base_config, requests)
    return tuple(left_out_of_space(stages, here, planned, catalogue=True))


def _planned_requests(
    typed: ForeseenRun, base_config: Mapping[str, Any], requests: Sequence[RequestedKnob]
) -> list[RequestedKnob]:
    # The requests that make arms. A plan counts replicas and batches of one layout.
    turnable: Mapping[str, Sequence[Any]] = typed.program.get("turnable", {})
    requests = [each for each in requests if each.path not in GROUPS]
    requests = [each for each in requests if not is_switch(each.path) or is_planned(each)]
    own_values = {place: values[0] for place, values in turnable.items()} | switches_of(base_config)
    return _where_conditions_hold(requests, own_values)


def is_planned(request: RequestedKnob) -> bool:
    """Whether each value of a switch makes arms of a plan: it is coarse, no layout, and may be foreseen."""
    is_free = is_switch(request.path) and request.is_coarse and not request.layout
    return is_free and is_foreseeable(place_of(request.path))


def _where_conditions_hold(requests: Sequence[RequestedKnob], own: Mapping[str, Any]) -> list[RequestedKnob]:
    varied = {request.path for request in requests}
    found = []
    for request in requests:
        stays = {path for path in request.when if is_switch(path) and path not in varied}
        if all(own.get(place_of(path)) in request.when[path] for path in stays):
            left = {path: values for path, values in request.when.items() if path not in stays}
            found.append(replace(request, when=left))
    return found


def changed_word(place: str, value: Any) -> str:
    """The word for a switch of the program that differs from the user's, such as `no-compile`."""
    name = place.partition(":")[2] if is_turned(place) else place.lstrip("-")
    return switch_word(place, value) or f"no-{name.replace('_', '-')}"


def _with_label(arm: Arm, own: Mapping[str, Any]) -> PlanArm:
    plain = Arm({key: value for key, value in arm.knobs.items() if key != PROGRAM}).label
    switches = {
        changed_word(place, value): shown_switch(place, value)
        for place, value in switches_of(arm.knobs).items()
        if value != own.get(place)
    }
    return PlanArm("-".join([plain, *switches]), arm.family(0), switches=switches)


def with_switches(run: ForeseenRun, knobs: Mapping[str, Any]) -> ForeseenRun:
    """A run whose configuration has the switches of its arm. The run of the program as typed has none."""
    switches = switches_of(knobs)
    return replace(run, ds_config={**run.ds_config, PROGRAM: switches}) if switches else run


def run_overrides(candidate: Candidate) -> dict[str, Any]:
    """With the candidate's switches in the section `program`."""
    return {**candidate.overrides, **({PROGRAM: candidate.switches} if candidate.switches else {})}


def offloaded_sections(config: Mapping[str, Any]) -> set[str]:
    sections = ("offload_optimizer", "offload_param")
    return {each for each in sections if get_knob(config, f"zero_optimization.{each}.device") not in (None, "none")}


def own_label(base_config: Mapping[str, Any]) -> str:
    config = overwrite_deepspeed_config(base_config, {})
    coarse = {path: value for path, value in leaves(config) if path.startswith(_COARSE) and path != STAGE}
    arm = {"zero_optimization": {"stage": get_knob(config, STAGE, 0)}}
    for path, value in coarse.items():
        if path.endswith(".device"):
            arm["zero_optimization"][path.split(".")[1]] = {"device": value}
    return Arm(arm).label


def _without_groups(arm: Arm) -> Arm:
    # An arm without the sizes of groups of ranks, which the user's configuration has.
    if not any(path in GROUPS for path, _ in leaves(arm.knobs)):
        return arm
    knobs: dict[str, Any] = {}
    for path, value in leaves(arm.knobs):
        if path not in GROUPS:
            set_knob(knobs, path, value)
    return Arm(knobs, arm.fine)


def _is_asked_for(arm: Arm, asked: Iterable[str]) -> bool:
    asked = set(asked)
    return all(
        path.startswith(_COARSE)
        or path in _PERMISSIONS
        or path in asked
        or is_switch(path)
        # It is neutral.
        or (value is not True and value in (None, False, "none", 1))
        for path, value in leaves(arm.knobs)
    )


def check_groups(config: Mapping[str, Any], count: int, where: str) -> None:
    """Raises InputError if a number of devices cannot be divided into the groups of ranks of a configuration.

    `where` is the flag, for the error.
    """
    for path, size in group_sizes(config).items():
        if count % size:
            raise InputError(
                f"{count} devices cannot be divided into {GROUPS[path]} groups of {size}.",
                where=where,
                remedy=f"Ask for a multiple of {size} devices, or change {path}.",
            )


def check_count(config: Mapping[str, Any], count: int, where: str) -> None:
    """Raises InputError if model and batch cannot be divided over a number of devices, by the flag `where`."""
    check_groups(config, count, where)
    replicas, batch = count // ranks_of_a_replica(config), config.get(TRAIN_BATCH)
    if isinstance(batch, int) and not isinstance(batch, bool) and batch > 0 and batch % replicas:
        raise InputError(
            f"a global batch of {batch} samples cannot be divided over {replicas} replicas of the model.",
            where=where,
            remedy="Ask for a number of devices that divides it, or give another batch by --train-batch-size.",
        )


def batch_policy(
    typed: ForeseenRun,
    base_config: Mapping[str, Any],
    replicas: int,
    *,
    train_batch_size: int | None = None,
    free_batch: bool = False,
    max_micro_batch: int | None = None,
    grows_by: int | None = None,
) -> BatchPolicy:
    """The batches that arms may have on a number of replicas.

    If the configuration has a global batch, every arm and every number of devices keeps it. If it has only the batch of
    a device, the global batch is what the program trains on with so many devices. Replicas that cannot divide the
    global batch may have the next larger one that is a multiple of the micro-batch `grows_by` for each. If the program
    takes one micro-batch alone, that is the one of the user's accumulation. Raises InputError if no micro-batch divides
    that batch.
    """
    only = typed.micro_batch if typed.program.get("batch_varies", False) else None
    batch = None if free_batch else train_batch_size or _own_batch(typed, base_config, replicas)
    if batch is not None and grows_by is not None:
        of_all = replicas * grows_by
        batch = -(-batch // of_all) * of_all if only is None else replicas * only * typed.accumulation
    of_data = typed.program.get("samples_per_epoch")
    if of_data is not None:
        # No replica has more than all of them together have now.
        of_all_ranks = max(of_data * typed.replicas, typed.micro_batch)
        max_micro_batch = min(of_all_ranks, max_micro_batch or of_all_ranks)
    policy = BatchPolicy(
        train_batch_size=batch,
        gradient_accumulation_steps=typed.accumulation,
        data_parallel_size=replicas,
        max_micro_batch=max_micro_batch,
        only_micro_batch=only,
    )
    policy.check()
    return policy


def stated_run(base_config: Mapping[str, Any], count: int) -> ForeseenRun | None:
    """A run without events, of the batch that a configuration states by itself; None if the code decides on it."""
    micro = base_config.get(MICRO_BATCH)
    if type(micro) is not int or micro < 1:
        return None
    replicas = max(1, count // ranks_of_a_replica(base_config))
    accumulation = base_config.get(ACCUMULATION)
    if accumulation == "auto" and type(base_config.get(TRAIN_BATCH)) is not int:
        return None
    steps = accumulation if type(accumulation) is int else 1
    return ForeseenRun(world=count, replicas=replicas, micro_batch=micro, accumulation=steps)


def typed_overrides(config: Mapping[str, Any], count: int) -> dict[str, Any]:
    """What the first run changes in the user's batch, so that it goes on so many ranks.

    A stated batch that belongs to another number of ranks is divided anew.
    """
    replicas = max(1, count // ranks_of_a_replica(config))
    stated = {key: config.get(key) for key in (TRAIN_BATCH, MICRO_BATCH, ACCUMULATION)}
    numbers = {key: value for key, value in stated.items() if type(value) is int and value > 0}
    if TRAIN_BATCH in numbers and numbers[TRAIN_BATCH] % replicas == 0:
        each = numbers[TRAIN_BATCH] // replicas
        micro = next(size for size in range(min(each, numbers.get(MICRO_BATCH, each)), 0, -1) if each % size == 0)
        if MICRO_BATCH not in numbers and ACCUMULATION in numbers and each % numbers[ACCUMULATION] == 0:
            micro = each // numbers[ACCUMULATION]
        accumulation = each // micro
    elif MICRO_BATCH in numbers:
        micro = numbers[MICRO_BATCH]
        accumulation = resolve_batch({**numbers, TRAIN_BATCH: None}, replicas).gradient_accumulation_steps
    else:
        return {}
    if TRAIN_BATCH not in numbers:
        return {}
    return {MICRO_BATCH: micro, ACCUMULATION: accumulation, TRAIN_BATCH: micro * accumulation * replicas}


def _own_batch(typed: ForeseenRun, base_config: Mapping[str, Any], replicas: int) -> int:
    stated = base_config.get(TRAIN_BATCH)
    if isinstance(stated, int) and not isinstance(stated, bool):
        return stated
    if base_config.get(ACCUMULATION) == "auto":
        # The code decides on it, such as by the Trainer's flag.
        return typed.micro_batch * typed.accumulation * replicas
    try:
        partly = {key: base_config[key] for key in (MICRO_BATCH, ACCUMULATION) if key in base_config}
        return resolve_batch(partly, replicas).train_batch_size
    except InputError:
        # The code decides on it.
        return typed.micro_batch * typed.accumulation * replicas


# The values of a program's switches that a plan foresees apart.

_ONE_LAYOUT = "because a plan counts the replicas of one layout."


class SwitchValues:
    """The switches of a `search_space` and their values.

    Each value is tried in the user's own arm, one at a time. A switch with conditions is not tried, because the program
    may refuse it if they are not met. So is one that ZeroTune turns, whose values differ by what they are.
    """

    def __init__(
        self,
        requests: Sequence[RequestedKnob],
        own: Mapping[str, Any],
        of_own: PlanArm,
        name_of: Callable[[PlanArm], str],
    ) -> None:
        self._requests = requests
        self._own = own
        probes = {
            (place, repr(value)): self._probe(of_own.label, place, value)
            for request in requests
            if _is_tried(request)
            for place in (place_of(request.path),)
            for value in request.values
            if value is not None and value != own.get(place)
        }
        self.arms = [of_own, *probes.values()] if probes else []  # that have to be run, by the names that follow
        self._typed = name_of(of_own)
        self._probes = {each: name_of(arm) for each, arm in probes.items()}

    def _probe(self, label: str, place: str, value: Any) -> PlanArm:
        known = {each: its for each, its in self._own.items() if its is not None}
        return PlanArm(f"{label}-as-typed-{changed_word(place, value)}", {PROGRAM: {**known, place: value}})

    def apart(self, runs: Mapping[str, ForeseenRun]) -> tuple[tuple[RequestedKnob, ...], tuple[str, ...]]:
        """The requests with the values that are foreseen apart, and a sentence on each that is not."""
        needed = {path for request in self._requests for path in request.when}
        kept: list[RequestedKnob] = []
        notes: list[str] = []
        for request in self._requests:
            if request.path in GROUPS:
                notes.append(f"{request.path} stays as you have it, {_ONE_LAYOUT}")
            elif is_switch(request.path) and not is_planned(request):
                notes.append(_why_as_typed(request))
            elif not _is_tried(request):
                kept.append(request)
            else:
                values, said = self._of_request(request, runs, keeps_all=request.path in needed)
                notes += said
                kept += [replace(request, values=values)] if values else []
        return tuple(kept), tuple(notes)

    def resizing(self, runs: Mapping[str, ForeseenRun]) -> frozenset[str]:
        """The places of the switches that change the model's number of parameters."""
        found = ((place, runs[probe]) for (place, _), probe in self._probes.items())
        return frozenset(
            place for place, run in found if not run.stopped and run.parameters != runs[self._typed].parameters
        )

    def _of_request(
        self, request: RequestedKnob, runs: Mapping[str, ForeseenRun], keeps_all: bool
    ) -> tuple[tuple[Any, ...], list[str]]:
        """The values of a switch that are foreseen apart, none if they change nothing, and the sentences.

        If `keeps_all`, values that do the same stay, because a condition names them.
        """
        place = place_of(request.path)
        values: list[Any] = []
        notes: list[str] = []
        seen = [(self._own.get(place), runs[self._typed])] if self._probes else []
        for value in request.values:
            probe = self._probes.get((place, repr(value)))
            if probe is None:
                values.append(value)
                continue
            run = runs[probe]
            if run.stopped:
                notes.append(f"{shown_switch(place, value)} cannot be foreseen: {run.stopped}")
                continue
            like = None if keeps_all else next((each for each in seen if _is_like((value, run), each, place)), None)
            if like is None:
                seen.append((value, run))
                values.append(value)
            else:
                one, other = shown_switch(place, value), shown_switch(place, like[0])
                notes.append(f"{one} has the rows of {other}: in your arm its run does the same.")
                if repr(like[0]) not in map(repr, values):
                    values.append(like[0])
        changes = [value for value in values if value is not None and value != self._own.get(place)]
        return (tuple(values) if changes else ()), notes


def _is_tried(request: RequestedKnob) -> bool:
    return is_planned(request) and not request.when and not is_turned(place_of(request.path))


def _is_like(mine: tuple[Any, ForeseenRun], its: tuple[Any, ForeseenRun], place: str) -> bool:
    # Whether two values of a switch have the same rows. A compiled model runs as it is written.
    (value, one), (other_value, other) = mine, its
    return (
        compiles({place: value}) == compiles({place: other_value})
        and (one.parameters, one.trainable, one.micro_batch) == (other.parameters, other.trainable, other.micro_batch)
        and one.storages == other.storages
        and one.events == other.events
        and one.operations == other.operations
    )


def _why_as_typed(request: RequestedKnob) -> str:
    place = place_of(request.path)
    if is_turned(place):
        return f"{place} stays as your program has it: no foreseen run shows what it changes."
    if request.layout:
        return f"{place} stays as typed, {_ONE_LAYOUT}"
    if not is_foreseeable(place):
        return f"{place} stays as typed: libraries read this variable, and no foreseen run shows what it changes."
    return f"{place} stays as typed, because it is a fine switch. With `coarse: true` its values are foreseen."
