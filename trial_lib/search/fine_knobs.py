"""The settings of an arm's fine knobs that are worth a look, by Optuna's tree-structured Parzen estimator."""

import warnings
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from trial_lib.search.knobs import Arm

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.trial import FrozenTrial

# The estimator draws at random until it has this many trials. Fewer are no distribution.
_STARTUP_TRIALS = 5


@dataclass(frozen=True)
class FineTrial:
    """The result of one setting of the fine knobs."""

    index: int  # the lineage in its arm
    # The cost to minimise, at a size that is the same for all. None if the setting did not fit into memory.
    cost: float | None


def fine_trials(ran: Iterable[tuple[int, float]], did_not_fit: Iterable[int]) -> list[FineTrial]:
    """Returns results, with costs at one size. A lineage that fitted only at some sizes has its cost."""
    trials = [FineTrial(index, cost) for index, cost in ran]
    known = {trial.index for trial in trials}
    return trials + [FineTrial(index, None) for index in did_not_fit if index not in known]


def propose(
    arm: Arm, tried: Sequence[FineTrial], seed: int, proposals: int, leader: int = 0, held: Collection[str] = ()
) -> list[int]:
    """Returns lineages of an arm that the estimator would try next, without repetition.

    A held knob keeps the leader's value. Each other value of it is proposed beside the leader, with nothing else
    changed. Most draws of several such knobs would have a value that is expected to cost.

    The estimator is built anew from the trials. A lineage that did not fit enters as pruned and infeasible, because
    Optuna's samplers ignore failed trials and would propose the same again.
    """
    import optuna  # takes half a second

    leading = _positions(arm, leader)
    alone = [
        _index(arm, {**leading, knob.path: position})
        for knob in arm.fine
        if knob.path in held
        for position in range(len(knob.values))
    ]
    knobs = [knob for knob in arm.fine if len(knob.values) > 1 and knob.path not in held]
    if not knobs:
        return list(dict.fromkeys([leader, *alone]))
    # Positions, not values: Optuna's categories may not be lists, and 1 and True would be the same.
    distributions: dict[str, BaseDistribution] = {
        knob.path: optuna.distributions.CategoricalDistribution(tuple(range(len(knob.values)))) for knob in knobs
    }
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        sampler = optuna.samplers.TPESampler(seed=seed, multivariate=True, n_startup_trials=_STARTUP_TRIALS)
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    try:
        study = optuna.create_study(sampler=sampler)
        study.add_trials(_recorded(arm, trial, distributions) for trial in tried)
        asked = [study.ask(distributions).params for _ in range(proposals)]
    finally:
        optuna.logging.set_verbosity(verbosity)
    kept = {path: position for path, position in leading.items() if path in held}
    return list(dict.fromkeys([*(_index(arm, {**kept, **positions}) for positions in asked), *alone]))


def _recorded(arm: Arm, trial: FineTrial, distributions: "dict[str, BaseDistribution]") -> "FrozenTrial":
    import optuna

    fits = trial.cost is not None
    return optuna.trial.create_trial(
        state=optuna.trial.TrialState.COMPLETE if fits else optuna.trial.TrialState.PRUNED,
        value=trial.cost,
        params={path: position for path, position in _positions(arm, trial.index).items() if path in distributions},
        distributions=distributions,
        constraints={"memory": 0.0 if fits else 1.0},
    )


def _positions(arm: Arm, index: int) -> dict[str, int]:
    positions = {}
    for knob in arm.fine:
        index, positions[knob.path] = divmod(index, len(knob.values))
    return positions


def _index(arm: Arm, positions: dict[str, int]) -> int:
    index, weight = 0, 1
    for knob in arm.fine:
        index += weight * positions.get(knob.path, 0)
        weight *= len(knob.values)
    return index
