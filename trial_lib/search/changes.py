"""The changes that a candidate makes to the user's configuration, and the same candidate without some of them."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from zerotune.trial_lib.deepspeed_config.overrides import MICRO_BATCH
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.records.switches import place_of
from zerotune.trial_lib.search.arms import Refusals, RequestedKnob, knobs_with
from zerotune.trial_lib.search.catalogue import KNOBS, OFFLOAD_OPTIMIZER, OFFLOAD_PARAM, is_coarse
from zerotune.trial_lib.search.effects import Surroundings
from zerotune.trial_lib.search.knobs import STAGE, get_knob, leaves, plain, set_knob, withdrawn

_MISSING = object()


@dataclass(frozen=True)
class ChangedKnob:
    """One knob that a candidate has at another value than the user. The micro-batch with its accumulation is one."""

    path: str  # in the DeepSpeed configuration, or of a switch. `MICRO_BATCH` for the batch.
    value: Any  # the candidate's
    own: Any  # the user's. None if the configuration leaves it open.
    is_fine: bool  # whether it decides neither memory nor mathematics

    @property
    def knob(self) -> str:
        return "micro-batch" if self.path == MICRO_BATCH else place_of(self.path).removeprefix("zero_optimization.")


class Changes:
    """The changes of one candidate. `own` is the user's configuration as a candidate."""

    def __init__(
        self, candidate: Candidate, own: Candidate, here: Surroundings, requests: Sequence[RequestedKnob]
    ) -> None:
        self.candidate = candidate
        self._own, self._here, self._requests = own, here, requests
        self._refusals = Refusals(here)
        self._coarse = self._coarse_of(candidate)
        of_arm = knobs_with(self._coarse, {}, here, requests)
        settings = leaves(candidate.knobs)
        self._fine = {path: value for path, value in settings if get_knob(of_arm, path, _MISSING) is _MISSING}
        with_effect = knobs_with(self._coarse, self._fine, here, requests)
        # What has no effect in this candidate cannot lose it with another knob.
        self._idle = {path for path in self._fine if get_knob(with_effect, path, _MISSING) is _MISSING}
        self.all = tuple(self._found())

    def without(self, dropped: Collection[ChangedKnob]) -> Candidate | None:
        """The candidate with the user's values of some knobs. Knobs that have no effect without these, or that
        DeepSpeed refuses then, fall too. None if DeepSpeed refuses it anyway, or if the batch cannot be kept.
        """
        paths = {change.path for change in dropped}
        coarse = {path: value for path, value in self._coarse.items() if path not in paths}
        coarse[STAGE] = self._own_stage if STAGE in paths else self._coarse[STAGE]
        fine = {path: value for path, value in self._fine.items() if path not in paths}
        accepted = self._refusals.has(self.candidate.knobs, {})
        for also in (None, *fine):
            kept = {path: value for path, value in fine.items() if path != also}
            knobs = knobs_with(coarse, kept, self._here, self._requests)
            for path in self._idle & kept.keys():
                set_knob(knobs, path, kept[path])
            if accepted or not self._refusals.has(knobs, {}):
                return self._batched(knobs, self._own if MICRO_BATCH in paths else self.candidate)
        return None

    def left_in(self, candidate: Candidate) -> frozenset[str]:
        """The paths of those of these changes that a candidate makes as well."""
        theirs = {change.path for change in Changes(candidate, self._own, self._here, self._requests).all}
        return frozenset(change.path for change in self.all if change.path in theirs)

    def _batched(self, knobs: dict[str, Any], batch: Candidate) -> Candidate | None:
        # With the global batch of that candidate, whatever groups the knobs make of the devices.
        size, accumulation, replicas = batch.micro_batch_size, batch.gradient_accumulation_steps, None
        if batch.data_parallel_size is not None:
            replicas = self._here.replicas_of(knobs)
            accumulation, left = divmod(accumulation * batch.data_parallel_size, replicas)
            if left or not accumulation:
                return None
        return Candidate(
            knobs=knobs,
            micro_batch_size=size,
            gradient_accumulation_steps=accumulation,
            slots=self.candidate.slots,
            data_parallel_size=replicas,
        )

    @property
    def _own_stage(self) -> int:
        stage = get_knob(self._here.base_config, STAGE, 0)
        return stage if isinstance(stage, int) else 0

    def _coarse_of(self, candidate: Candidate) -> dict[str, Any]:
        stage = get_knob(candidate.knobs, STAGE, self._own_stage)
        asked = [request.path for request in self._requests if request.is_coarse]
        coarse: dict[str, Any] = {STAGE: stage}
        for path in dict.fromkeys([*filter(is_coarse, KNOBS), *asked]):
            value = get_knob(candidate.knobs, path, _MISSING)
            section = path.rpartition(".")[0]
            if value is not _MISSING:
                coarse[path] = value
            elif path in (OFFLOAD_OPTIMIZER, OFFLOAD_PARAM) and self._is_switched_off(candidate, section, stage):
                coarse[path] = "none"
        return coarse

    def _is_switched_off(self, candidate: Candidate, section: str, stage: int) -> bool:
        # Below some stage a section of the user's has no effect, and the stage withdraws it.
        by_stage = withdrawn(stage, self._here.base_config).get(section.rpartition(".")[2], _MISSING) is None
        return get_knob(candidate.knobs, section, _MISSING) is None and not by_stage

    def _found(self) -> Sequence[ChangedKnob]:
        stage = self._coarse[STAGE]
        found = [] if stage == self._own_stage else [ChangedKnob(STAGE, stage, self._own_stage, is_fine=False)]
        for path, value in self._coarse.items():
            own = self._here.own_at(stage, path)
            default = KNOBS[path].default if path in KNOBS else None
            if path != STAGE and plain(value) != plain(default if own is None else own):
                found.append(ChangedKnob(path, value, own, is_fine=False))
        for path, value in self._fine.items():
            if value != (own := self._here.own(path)):
                found.append(ChangedKnob(path, value, own, is_fine=True))
        sizes, own_sizes = (
            (each.micro_batch_size, each.gradient_accumulation_steps) for each in (self.candidate, self._own)
        )
        if sizes != own_sizes:
            found.append(ChangedKnob(MICRO_BATCH, sizes, own_sizes, is_fine=False))
        return found
