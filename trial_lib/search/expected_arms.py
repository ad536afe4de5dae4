"""The arms of a search as a plan expects them: which comes first, in which order, and which cannot fit. Pure."""

from collections.abc import Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log, log1p
from statistics import median
from typing import Any

from trial_lib.command.switches import unforeseen_switches
from trial_lib.deepspeed_config.layout import LAYOUTS, Layout
from trial_lib.deepspeed_config.overrides import overwrite_deepspeed_config
from trial_lib.memory.zero_settings import ArmKey, arm_key
from trial_lib.search.arm_priors import prior_costs
from trial_lib.search.cost_model import HALF_SIZE
from trial_lib.space.knobs import Arm, SearchSpace


@dataclass(frozen=True, kw_only=True)
class ExpectedArm:
    """One arm of a plan.

    Attributes:
        key: of its configuration.
        label: such as `z3-offload-optimizer`.
        micro_batch: samples, the fastest of those that fit.
        samples_per_s: at that micro-batch; 0 if the plan does not say.
        is_first: whether it is the plan's answer.
        no_room: why it cannot fit here, as a clause; empty if it may.
        switches: the places of the program's switches that the plan's foreseen runs have set.
    """

    key: ArmKey
    label: str
    micro_batch: int = 1
    samples_per_s: float = 0.0
    is_first: bool = False
    no_room: str = ""
    switches: frozenset[str] = frozenset()

    @property
    def cost(self) -> float:
        """The logarithm of a sample's cost at a large micro-batch, up to a constant of the plan."""
        return -log(self.samples_per_s) - log1p(HALF_SIZE / self.micro_batch)


def switches_in(expected: Iterable[ExpectedArm]) -> frozenset[str]:
    """Returns the places of the program's switches that a plan has foreseen."""
    return frozenset(place for arm in expected for place in arm.switches)


def key_in_plan(config: Mapping[str, Any], base_config: Mapping[str, Any], foreseen: Collection[str]) -> ArmKey:
    """Returns the key that a plan has of a configuration's arm; an empty one if the layout is not the user's.

    A plan keeps the user's layout, and does not record which switches are layouts.

    Args:
        config: a complete configuration.
        base_config: the user's.
        foreseen: the places of the switches that the plan has foreseen.
    """
    if Layout.of(config) != Layout.of(base_config):
        return ()
    return arm_key({key: value for key, value in config.items() if key != LAYOUTS}, foreseen)


def key_of(arm: Arm, base_config: Mapping[str, Any], foreseen: Collection[str] = ()) -> ArmKey:
    """Returns the key of an arm's best guess. A plan has other switches than as typed if it has foreseen them.

    Args:
        arm: of a search space.
        base_config: the user's DeepSpeed configuration.
        foreseen: the places of the switches that the plan has foreseen.
    """
    key = key_in_plan(overwrite_deepspeed_config(base_config, arm.lineage(0)), base_config, foreseen)
    return (*key, *unforeseen_switches(arm.knobs, base_config, foreseen))


def expected_costs(arms: Sequence[Arm], base_config: Mapping[str, Any], expected: Sequence[ExpectedArm]) -> list[float]:
    """Returns the expected cost of each arm beside the cheapest, as a logarithm.

    The plan's speeds decide. An arm whose speed no plan says has the cost of the formulas, on the level of the others.

    Args:
        arms: of the space.
        base_config: the user's DeepSpeed configuration.
        expected: the arms of a plan; none without one.
    """
    formula = prior_costs(arms)
    planned = {arm.key: arm.cost for arm in expected if arm.samples_per_s > 0}
    foreseen = switches_in(expected)
    found = [planned.get(key_of(arm, base_config, foreseen)) for arm in arms] if planned else [None] * len(arms)
    levels = [cost - by_formula for cost, by_formula in zip(found, formula, strict=True) if cost is not None]
    if not levels:
        return formula
    level = median(levels)
    costs = [by_formula + level if cost is None else cost for cost, by_formula in zip(found, formula, strict=True)]
    return [cost - min(costs) for cost in costs]


def without_hopeless(
    space: SearchSpace, base_config: Mapping[str, Any], expected: Sequence[ExpectedArm], ran: Container[ArmKey]
) -> tuple[SearchSpace, list[str]]:
    """Returns a space without the arms that cannot fit, and a sentence for each of them.

    The space stays whole if no arm would be left.

    Args:
        space: the configurations that a study may try.
        base_config: the user's DeepSpeed configuration.
        expected: the arms of a plan.
        ran: arms that have run here, whatever the plan says.
    """
    cannot = {arm.key: arm.no_room for arm in expected if arm.no_room and arm.key not in ran}
    foreseen = switches_in(expected)
    keys = [(arm, key_of(arm, base_config, foreseen)) for arm in space.arms] if cannot else []
    kept = [arm for arm, key in keys if key not in cannot]
    if not kept or len(kept) == len(space.arms):
        return space, []
    told = [f"{arm.label} is not tried: by the plan {cannot[key]}" for arm, key in keys if key in cannot]
    return SearchSpace.of_arms(kept), told
