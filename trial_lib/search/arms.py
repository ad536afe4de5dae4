"""The arms of a search space, from the catalogue, the user's requests, and the effects of settings together."""

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Any

from zerotune.trial_lib.deepspeed_config.layout import ModelShape
from zerotune.trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from zerotune.trial_lib.deepspeed_config.rules import (
    DeviceName,
    broken_rules,
    is_elementwise,
    steps_where_it_is,
    untested_under_zero,
)
from zerotune.trial_lib.messages.foreseen_run import ForeseenRun
from zerotune.trial_lib.messages.measurement import ProgramProfile
from zerotune.trial_lib.messages.turned import TURNED, is_turned
from zerotune.trial_lib.records.candidate import YOURS, Candidate
from zerotune.trial_lib.records.result import TrialResult, read_program
from zerotune.trial_lib.records.switches import deepspeed_part, is_switch, path_of, place_of, shown_switch, switches_of
from zerotune.trial_lib.search.catalogue import (
    KEPT_GATHERED,
    KNOBS,
    OFFLOAD_OPTIMIZER,
    OFFLOAD_PARAM,
    catalogues_name,
    is_coarse,
    is_known,
    nvme_path,
    spelled,
)
from zerotune.trial_lib.search.effects import (
    CoarseSetting,
    Effect,
    Surroundings,
    has_version,
    is_layout,
    read_at,
    shown,
    undivided,
    undivided_together,
)
from zerotune.trial_lib.search.knobs import (
    STAGE,
    Arm,
    Knob,
    SearchSpace,
    coarse_word,
    get_knob,
    leaves,
    set_knob,
    withdrawn,
)

# What DeepSpeed refuses in a study: by the table of rules, and by facts of the program that the table has not.

REDUCE_SCATTER = "zero_optimization.reduce_scatter"
# deepspeed/runtime/zero/stage_1_and_2.py _configure_moe_settings
_NEEDED_BY_EXPERTS = {1: (REDUCE_SCATTER,), 2: (REDUCE_SCATTER, "zero_optimization.contiguous_gradients")}
_NOT_WITH_AUTOEP = {
    "zero_optimization.zero_hpz_partition_size": 1,
    "zero_optimization.zero_quantized_gradients": False,
    "sequence_parallel_size": 1,
}
_ZENFLOW = "zero_optimization.zenflow"


class Refusals:
    """What DeepSpeed refuses of candidates, for a reason that does not hold for the user's configuration."""

    def __init__(self, here: Surroundings) -> None:
        self._here = here
        self._own = refusals_of(here.base_config, here).keys()
        self._known: dict[str, bool] = {}

    def has(self, knobs: Mapping[str, Any], fine: Mapping[str, Any]) -> bool:
        """Whether DeepSpeed refuses coarse knobs, in sections, with some fine ones changed, by path."""
        # DeepSpeed reads none of the other switches, so arms that differ in them alone share an answer.
        layouts = [each for each in switches_of(knobs).items() if is_layout(path_of(each[0]), self._here)]
        read = [(path, value) for path, value in fine.items() if not is_switch(path)]
        key = repr((deepspeed_part(knobs), layouts, read))
        if key not in self._known:
            overrides = copy.deepcopy(dict(knobs))
            for path, value in fine.items():
                set_knob(overrides, path, value)
            theirs = refusals_of(overwrite_deepspeed_config(self._here.base_config, overrides), self._here)
            self._known[key] = bool(theirs.keys() - self._own)
        return self._known[key]


def refusals_of(config: Mapping[str, Any], here: Surroundings) -> dict[str, str]:
    """Returns the reasons for which DeepSpeed refuses a configuration here, by the rule's name."""
    device: DeviceName = "cuda" if here.device == "cuda" else "cpu"
    optimizer = "" if here.program.by_accelerate else here.program.optimizer
    replicas = here.replicas_of(config)
    broken = broken_rules(config, device, here.pipeline, replicas, optimizer, slots=here.slots, shape=here.shape)
    reasons = {rule.name: rule.reason for rule in broken if rule.effect != "ignored"}
    stage = get_knob(config, STAGE, 0)
    if here.program.has_experts and stage == 3:
        # deepspeed/runtime/engine.py _validate_zero3_moe_compatibility
        if not here.program.by_autoep:
            reasons["experts_at_stage_3"] = "DeepSpeed's mixture of experts does not go with stage 3."
        elif any(get_knob(config, path, none) not in (none, 0, "auto") for path, none in _NOT_WITH_AUTOEP.items()):
            reasons["autoep_at_stage_3"] = "At stage 3 AutoEP goes neither with ZeRO++ nor with sequence parallelism."
    for key in _NEEDED_BY_EXPERTS.get(stage, ()) if here.program.has_experts else ():
        if get_knob(config, key, True) is False:
            reasons[f"experts_without_{key}"] = f'DeepSpeed\'s mixture of experts needs "{key}": true at stage {stage}.'
    if here.program.repeats_backward and (of_repeats := _gradients_of_repeats(config)) != "all":
        reasons[f"keeps_{of_repeats}"] = (
            "The program calls backward more than once for one step. Of such gradients DeepSpeed loses some at ZeRO "
            "stages 1 and 2, and adds up all of them at stages 0 and 3."
        )
    elif here.program.repeats_backward and _gradients_of_repeats(here.base_config) != "all":
        reasons["keeps_all"] = (
            "The program calls backward more than once for one step. At your ZeRO stage DeepSpeed loses some of those "
            "gradients, and here it adds up all of them, so the training would change."
        )
    if get_knob(config, _ZENFLOW) is not None and (stage == 0 or get_knob(config, OFFLOAD_OPTIMIZER) != "cpu"):
        # deepspeed/runtime/zenflow/zenflow_stage_1_and_2.py; at stage 0 the engine has no such optimizer.
        reasons["zenflow_without_offload"] = "ZenFlow works with an optimizer that is offloaded to the CPU."
    is_offloaded = stage != 0 and get_knob(config, OFFLOAD_OPTIMIZER) in ("cpu", "nvme")
    if not steps_where_it_is(here.program.optimizer, here.device, is_offloaded):
        place = "offloaded" if is_offloaded else "without offload"
        reasons["optimizer_where_it_cannot_step"] = f"{here.program.optimizer} cannot step {place}."
    return reasons


def _gradients_of_repeats(config: Mapping[str, Any]) -> str:
    """The gradients that DeepSpeed keeps if backward is called again for one step (`rank/engine_watch.py`)."""
    if get_knob(config, STAGE, 0) not in (1, 2):
        return "all"
    return "some" if get_knob(config, OFFLOAD_OPTIMIZER) in ("cpu", "nvme") else "the_last"


_ALLOW_UNTESTED = "zero_allow_untested_optimizer"


@dataclass(frozen=True)
class RequestedKnob:
    """A knob of the experiment's `search_space`."""

    path: str  # its name in the catalogue, the path of any DeepSpeed setting, or that of a program's switch
    values: tuple[Any, ...]  # the values to try. One value fixes it. None, for a switch, is the user's value.
    # Coarse settings, by path. The knob is varied if each of them has one of the values.
    when: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    coarse: bool | None = None  # whether a switch decides memory or mathematics; None for a DeepSpeed setting
    changes_mathematics: bool = False  # whether a switch changes the training, so that losses are not compared
    layout: str = ""  # the kind of the groups that a switch is the size of, as in `LAYOUT_KINDS`; empty for any other

    @property
    def is_coarse(self) -> bool:
        return is_coarse(self.path) if self.coarse is None else self.coarse


def build_space(
    zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob], *, catalogue: bool
) -> SearchSpace:
    """Returns a space, the catalogue's or dsat's, in which the user's requests replace its own knobs. In the
    catalogue's, every knob has its best guess first: the user's value, else DeepSpeed's default, at most the model's
    size. The stages are those that may be used unless the user requests others.
    """
    return SearchSpace.of_arms(arm for _, arm in _arms(zero_stages, here, requests, catalogue))


def without_effect(
    zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob], *, catalogue: bool
) -> list[str]:
    """Returns one sentence for each requested knob that no candidate has, because it would have no effect."""
    arms = _arms(zero_stages, here, requests, catalogue)
    sentences = []
    for request in requests:
        if request.path == STAGE or any(_has(request.path, setting, arm, here) for setting, arm in arms):
            continue
        name = place_of(request.path) if is_turned(place_of(request.path)) else request.path
        sentences.append(f"{name} has no effect: {_why(request, [setting for setting, _ in arms], here)}.")
    return sentences


def not_known(requests: Sequence[RequestedKnob]) -> list[str]:
    """Returns one sentence for each requested knob of which nobody has read where DeepSpeed uses it."""
    unknown = (request.path for request in requests if not is_switch(request.path) and not is_known(request.path))
    return [f"{path} is not known to have an effect: it is tried because you ask for it." for path in unknown]


def stages_not_tried(zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob]) -> list[str]:
    """Returns one sentence for each reason for which DeepSpeed refuses stages in every arm of the catalogue's space."""
    zero_stages = next((request.values for request in requests if request.path == STAGE), tuple(zero_stages))
    tried = {arm.stage for _, arm in _arms(zero_stages, here, requests, catalogue=True)}
    own = refusals_of(here.base_config, here)
    left_out: dict[str, list[str]] = {}
    for stage in sorted(set(zero_stages) - tried):
        config = overwrite_deepspeed_config(here.base_config, _knobs_of({STAGE: stage}, here))
        reason = next((why for name, why in refusals_of(config, here).items() if name not in own), None)
        if reason is not None:
            left_out.setdefault(reason, []).append(str(stage))
    return [f"ZeRO stage {' and '.join(stages)} is not tried: {reason}" for reason, stages in left_out.items()]


def _arms(
    zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob], catalogue: bool
) -> list[tuple[CoarseSetting, Arm]]:
    resolved = (_resolved(request, here) for request in requests)
    asked = {request.path: request for request in resolved if request.values}
    arms = list(_every_arm(zero_stages, here, asked, catalogue))
    if not catalogue:
        return arms
    refusals = Refusals(here)
    accepted = ((setting, _without_refused(arm, setting, asked, here, refusals)) for setting, arm in arms)
    # If DeepSpeed refuses every arm, the trials say why.
    return [(setting, arm) for setting, arm in accepted if arm is not None] or arms


def _resolved(request: RequestedKnob, here: Surroundings) -> RequestedKnob:
    """Returns a request in which the user's value of a switch has taken the place of None. It keeps the values alone
    that the program can have, if ZeroTune turns the switch, and the groups alone that divide devices and model. There
    may be none.
    """
    values = request.values
    if is_switch(request.path):
        own, place = here.own(request.path), place_of(request.path)
        values = tuple(dict.fromkeys(own if value is None else value for value in values))
        if is_turned(place):
            values = tuple(value for value in values if value in here.program.turnable.get(place, ()))
    if is_layout(request.path, here):
        values = tuple(size for size in values if not undivided(request.path, size, here))
    return replace(request, values=values)


def _every_arm(
    zero_stages: Iterable[int], here: Surroundings, asked: Mapping[str, RequestedKnob], catalogue: bool
) -> Iterator[tuple[CoarseSetting, Arm]]:
    stages = sorted(set(asked[STAGE].values if STAGE in asked else zero_stages))
    dsats = SearchSpace.for_model(stages, here.num_params, here.base_config)
    found = []
    for stage, dsats_arm in zip(stages, dsats.arms, strict=True):
        coarse = list(_of_catalogue({STAGE: stage}, here, coarse=True)) if catalogue else []
        axes = {path: values for path, values in coarse if len(values) > 1}
        axes.update({path: asked[path].values for path in asked if asked[path].is_coarse and path != STAGE})
        for values in product(*axes.values()):
            setting = _effective({STAGE: stage, **dict(zip(axes, values, strict=True))}, asked, here)
            own = _of_catalogue(setting, here, coarse=False)
            unasked = [Knob(*knob) for knob in own] if catalogue else dsats_arm.fine
            arm = Arm(_knobs_of(setting, here), tuple(_fine(setting, here, unasked, asked)))
            if undivided_together(arm.knobs, here):
                continue
            config = overwrite_deepspeed_config(here.base_config, arm.knobs)
            if config not in found:
                found.append(config)
                yield setting, arm


def _without_refused(
    arm: Arm, setting: CoarseSetting, asked: Mapping[str, RequestedKnob], here: Surroundings, refusals: Refusals
) -> Arm | None:
    """Returns an arm without the values that DeepSpeed refuses in it; None if it refuses the whole arm. The user's
    requests stay. The trial's reason shows the refusal.
    """
    free = [knob for knob in arm.fine if catalogues_name(knob.path) not in asked]
    paths = {knob.path for knob in arm.fine}
    wanted = [{knob.path: value} for knob in arm.fine if knob not in free for value in knob.values]
    accepted = (one for one in ({}, *wanted) if not refusals.has(arm.knobs, one))
    mended: dict[str, Any] | None = next(accepted, None)
    # One setting beside the arm may make DeepSpeed accept it.
    if mended is None:
        mends = [{knob.path: value} for knob in free for value in knob.values]
        if REDUCE_SCATTER not in asked.keys() | paths:
            mends.append({REDUCE_SCATTER: False})  # stages 2 and 3 refuse it most often
        mended = next((mend for mend in mends if not refusals.has(arm.knobs, mend)), None)
        if mended is None:
            unasked = {path: value for path, value in setting.items() if path == STAGE or path not in asked}
            is_asked_for = len(unasked) < len(setting) and not refusals.has(_knobs_of(unasked, here), {})
            return arm if is_asked_for else None
    # Leave out single values that are refused beside it.
    fine = [Knob(path, (value,)) for path, value in mended.items() if path == REDUCE_SCATTER and path not in paths]
    for knob in arm.fine:
        values = knob.values
        if knob in free:
            values = tuple(v for v in values if not refusals.has(arm.knobs, {**mended, knob.path: v}))
        if values:
            fine.append(Knob(knob.path, values))
    return Arm(arm.knobs, tuple(fine))


def _of_catalogue(setting: CoarseSetting, here: Surroundings, coarse: bool) -> Iterator[tuple[str, tuple[Any, ...]]]:
    for path, known in KNOBS.items():
        effect = _effect(path, setting, here) if known.is_coarse is coarse else None
        if effect is not None and effect.candidates is not None:
            path = spelled(path, here.base_config)
            if values := effect.candidates(here, here.own(path)):
                yield path, values


def _effective(setting: dict[str, Any], asked: Mapping[str, RequestedKnob], here: Surroundings) -> CoarseSetting:
    # A setting without the parts that have no effect in it. They keep the user's values.
    while True:
        kept = {
            path: value
            for path, value in setting.items()
            if path == STAGE
            or (_acts(path, value, setting, here) and (path not in asked or _meets(asked[path], setting, here)))
        }
        if len(kept) == len(setting):
            return kept
        setting = kept


def _fine(
    setting: CoarseSetting, here: Surroundings, unasked: Sequence[Knob], asked: Mapping[str, RequestedKnob]
) -> Iterator[Knob]:
    mine = {
        spelled(path, here.base_config): request
        for path, request in asked.items()
        if not request.is_coarse
        and (path not in KNOBS or _effect(path, setting, here) is not None)
        and _meets(request, setting, here)
    }
    named = {spelled(path, here.base_config) for path in asked}
    fixed = KEPT_GATHERED if setting.get(OFFLOAD_PARAM) == "nvme" else ()
    for knob in unasked:
        if knob.path not in named:
            if knob.path not in fixed:
                yield knob
        elif knob.path in mine:
            yield Knob(knob.path, mine.pop(knob.path).values)
    for path, request in mine.items():
        yield Knob(path, request.values)


def _knobs_of(setting: CoarseSetting, here: Surroundings) -> dict[str, Any]:
    zero = {"stage": setting[STAGE], **withdrawn(setting[STAGE], here.base_config)}
    knobs: dict[str, Any] = {"zero_optimization": zero}
    for path, value in setting.items():
        section = path.rpartition(".")[0]
        if path in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM):
            if value != "none":
                set_knob(knobs, path, value)
                if value == "nvme" and (device := here.own(f"{section}.nvme_path") or nvme_path(here.base_config)):
                    set_knob(knobs, f"{section}.nvme_path", device)
            elif here.own(section) is not None:
                set_knob(knobs, section, None)
        elif path != STAGE and not (here.own(path) is None and _is_default(path, value)):
            set_knob(knobs, path, value)
    if setting.get(OFFLOAD_PARAM) == "nvme" != here.own(OFFLOAD_PARAM):
        for path in KEPT_GATHERED:
            set_knob(knobs, path, 0)
    return knobs | _permissions(setting, here)


def knobs_with(
    coarse: CoarseSetting, fine: Mapping[str, Any], here: Surroundings, requests: Iterable[RequestedKnob]
) -> dict[str, Any]:
    """Returns knobs with some settings, by path, and without those of them that have no effect beside the others."""
    setting = _effective(dict(coarse), {request.path: request for request in requests}, here)
    knobs = _knobs_of(setting, here)
    for path, value in fine.items():
        if catalogues_name(path) not in KNOBS or _effect(catalogues_name(path), setting, here) is not None:
            set_knob(knobs, path, value)
    return knobs


def _permissions(setting: CoarseSetting, here: Surroundings) -> dict[str, bool]:
    permissions = {}
    named = here.own("optimizer")
    offloads = setting.get(OFFLOAD_OPTIMIZER, "none") != "none"
    does_already = here.own(OFFLOAD_OPTIMIZER) not in (None, "none")
    if offloads and not does_already and (here.program.optimizer or not named):
        # The code makes the optimizer. Unless told to, DeepSpeed refuses to offload any but its own kind. And
        # Accelerate would replace it by an Adam.
        permissions["zero_force_ds_cpu_optimizer"] = False
    is_permitted = here.program.by_accelerate or here.own(_ALLOW_UNTESTED) is True
    optimizer = (str(named.get("type", "")).lower() if isinstance(named, Mapping) else "", here.program.optimizer)
    if setting[STAGE] != 0 and not is_permitted and untested_under_zero(*optimizer) and is_elementwise(*optimizer):
        permissions[_ALLOW_UNTESTED] = True
    return permissions


def _is_default(path: str, value: Any) -> bool:
    known = KNOBS.get(path)
    return known is not None and known.default is not None and known.default == value


def _value_of(path: str, setting: CoarseSetting, here: Surroundings) -> Any:
    if path in setting:
        return setting[path]
    own = here.own_at(setting[STAGE], path)
    return own if own is not None or path not in KNOBS else KNOBS[path].default


def _lacks(effect: Effect, setting: CoarseSetting, here: Surroundings) -> tuple[int, str]:
    return effect.lacks(setting, here, lambda path: _value_of(path, setting, here))


def _effect(path: str, setting: CoarseSetting, here: Surroundings) -> Effect | None:
    known = KNOBS[path]
    if not has_version(here.deepspeed, known.since):
        return None
    return next((effect for effect in known.effects if not _lacks(effect, setting, here)[1]), None)


def _acts(path: str, value: Any, setting: CoarseSetting, here: Surroundings) -> bool:
    if path not in KNOBS:
        return True
    effect = _effect(path, setting, here)
    return effect is not None and (effect.values is None or value in effect.values)


def _meets(request: RequestedKnob, setting: CoarseSetting, here: Surroundings) -> bool:
    return all(_value_of(path, setting, here) in values for path, values in request.when.items())


def _has(path: str, setting: CoarseSetting, arm: Arm, here: Surroundings) -> bool:
    return path in setting or any(knob.path == spelled(path, here.base_config) for knob in arm.fine)


def _why(request: RequestedKnob, settings: Sequence[CoarseSetting], here: Surroundings) -> str:
    # The reason that keeps a knob out of all settings. Of several it is the one nearest to an effect.
    place = place_of(request.path)
    if is_turned(place) and not _resolved(request, here).values:
        values = ", ".join(map(shown, here.program.turnable.get(place, ())))
        return here.program.not_turnable.get(place, f"your program can have {values or 'no value of it'}")
    known = KNOBS.get(request.path)
    met = [setting for setting in settings if _meets(request, setting, here)]
    if known is None or not met:
        return "no candidate meets its condition"
    if not has_version(here.deepspeed, known.since):
        return f"it takes DeepSpeed {known.since} or later, here is {here.deepspeed}"
    near, why = max(_lacks(effect, setting, here) for effect in known.effects for setting in met)
    if near == 1:
        why = read_at(stage for effect in known.effects if here.device in effect.devices for stage in effect.stages)
    return why if near < 9 else "none of its values acts at these ZeRO stages"


# The search space of one program, from its profile trial or from its foreseen run.


def surroundings_of(profiled: TrialResult, base_config: Mapping[str, Any], slots: int, device: str) -> Surroundings:
    """Returns the facts that decide which knobs have an effect on a program."""
    profile, program = profiled.profile, profiled.program or ProgramProfile()
    assert profile is not None
    # The tokens of every sample; 0 if samples differ, or if that is not known.
    tokens = (program.longest_sequence or 0) if program.longest_sequence == program.shortest_sequence else 0
    return Surroundings(
        device=device,
        slots=slots,
        replicas=profile.data_parallel_size,
        num_params=profile.num_params,
        trainable_num_params=profile.trainable_num_params,
        base_config=base_config,
        pipeline=profile.pipeline_parallel,
        deepspeed=profiled.versions.get("deepspeed", ""),
        program=program,
        shape=replace(ModelShape.of(profile), sequence_length=tokens),
    )


def foreseen_surroundings(typed: ForeseenRun, base_config: Mapping[str, Any], device: str) -> Surroundings:
    """Returns the facts that decide which knobs have an effect on a program that has not run yet. Nothing is known of
    the shape of its model, so no rule of divisibility is broken.
    """
    return Surroundings(
        device=device,
        slots=typed.world,
        replicas=typed.replicas,
        num_params=typed.parameters,
        trainable_num_params=typed.trainable,
        base_config=base_config,
        pipeline=typed.is_pipeline,
        deepspeed=typed.versions.get("deepspeed", ""),
        program=read_program(typed.program),
    )


def left_out_of_space(
    zero_stages: Iterable[int], here: Surroundings, requests: Sequence[RequestedKnob], *, catalogue: bool
) -> list[str]:
    """Returns one sentence for each request that nothing comes of, for each unknown one, and for ruled-out stages."""
    sentences = [
        f"search_space: {sentence}"
        for sentence in (*without_effect(zero_stages, here, requests, catalogue=catalogue), *not_known(requests))
    ]
    sentences += values_not_tried(requests, here)
    sentences += layouts_not_tried({each.path: each.values for each in requests}, here)
    return sentences + stages_not_tried(zero_stages, here, requests) if catalogue else sentences


def values_not_tried(requests: Sequence[RequestedKnob], here: Surroundings) -> list[str]:
    """Returns one sentence for each requested value that the program cannot have of a switch that ZeroTune turns. A
    switch without any of the requested values is not among them. `without_effect` has its reason. Neither is one that
    was requested without values, because the program decides which it can have.
    """
    sentences = []
    for request in requests:
        place = place_of(request.path)
        if not is_turned(place):
            continue
        offered = here.program.turnable.get(place, ())
        missing = [value for value in request.values if value is not None and value not in offered]
        if 0 < len(missing) < len(request.values) and request.values != TURNED[place].values:
            known = ", ".join(map(shown, offered))
            sentences += [
                f"{shown_switch(place, value)} is not tried: your program can have {known}." for value in missing
            ]
    return sentences


def layouts_not_tried(asked: Mapping[str, Iterable[Any]], here: Surroundings) -> list[str]:
    """Returns one sentence for each requested size of groups that is not tried."""
    reasons = {
        f"{place_of(path)} {size}": undivided(path, size, here)
        for path, sizes in asked.items()
        if is_layout(path, here)
        for size in sizes
        if size is not None
    }
    return [f"{name} is not tried: {reason}" for name, reason in reasons.items() if reason]


# The names of a study's candidates, for tables, Prefect and MLflow.

_UNITS = ((10**9, "G"), (10**6, "M"), (10**3, "k"))


class CandidateNames:
    """Names the candidates of one study, in the order of their trials. A name has the ZeRO stage, the coarse knobs that
    are on, the program's switches, and the micro-batch. Most candidates have the same fine knobs. So a name shows only
    the fine knobs that differ from those of the first candidate with the same coarse knobs.

    Example:
        >>> from zerotune.trial_lib.records.candidate import YOURS, Candidate
        >>> names = CandidateNames()
        >>> for overlap in (True, False):
        ...     zero = {"stage": 2, "overlap_comm": overlap}
        ...     print(names.of(Candidate(knobs={"zero_optimization": zero}, micro_batch_size=16)))
        z2-mbs16
        z2-mbs16-no-overlap
    """

    def __init__(self) -> None:
        self._first: dict[str, dict[str, Any]] = {}
        self._own: Candidate | None = None

    def of(self, candidate: Candidate, is_own: bool = False) -> str:
        """Returns the name of a candidate. Call it for every candidate, in the order of the trials.

        `is_own` says that it is the user's configuration, whose trial comes before those of the search.
        """
        if is_own:
            self._own = candidate
        settings = dict(leaves(candidate.knobs))
        coarse = [coarse_word(path, value) for path, value in settings.items() if path != STAGE and _is_of_arm(path)]
        stage = [] if candidate.zero_stage is None else [f"z{candidate.zero_stage}"]
        arm = "-".join([*stage, *sorted(filter(None, coarse))])
        fine = {path: value for path, value in settings.items() if not _is_of_arm(path)}
        first = self._first.setdefault(arm, fine)
        paths = [path for path in dict.fromkeys([*first, *fine]) if first.get(path) != fine.get(path)]
        words = [_word(path, fine.get(path)) for path in paths]
        if candidate == self._own:
            return YOURS
        return "-".join(filter(None, [arm, f"mbs{candidate.micro_batch_size}", *words]))


def _is_of_arm(path: str) -> bool:
    return is_coarse(path) or is_switch(path)


def _word(path: str, value: Any) -> str:
    known = KNOBS.get(path)
    word = known.word if known is not None and known.word else path.rpartition(".")[2]
    if isinstance(value, bool):
        return word if value else f"no-{word}"
    return f"{word}={'unset' if value is None else _short(value)}"


def _short(value: Any) -> str:
    # A value, with a unit if that loses nothing: `50M` for 50000000.
    if isinstance(value, list):
        return "+".join(map(str, value))
    if isinstance(value, int):
        for size, unit in _UNITS:
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)
