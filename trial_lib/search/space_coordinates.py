"""The places of the lineages of a space, as numbers, from which the likeness of two lineages is computed."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from trial_lib.command.switches import is_switch
from trial_lib.search.arm_priors import ONE_WAY, fine_cost
from trial_lib.space.knobs import LEFT_OPEN, Arm, SearchSpace, get_knob

Array = npt.NDArray[np.float64]

# Values without an order are so far apart that they share nothing.
_APART = 100.0
# Values of a switch whose effect has one direction are so much nearer, because they surprise less. This was set by
# hand. With 0.1, 0.25 and 0.5 the search is within 3 % on compiled_store after 7, 6 and 4 trials, and on slow_store
# after 2 (benchmarks/replay, 6 seeds).
_ONE_WAY_STEP = 0.25
_STAGE = "zero_optimization.stage"
_ABSENT = (None, False, "none")


class SpaceCoordinates:
    """Coordinates of every lineage (number of its arm, index there) of a space.

    A numeric knob has the ranks of its values, from 0 to 1. The values of another knob are all equally far apart. NaN
    means that an arm does not have the knob.

    Attributes:
        arms: of the space, in its order.
    """

    def __init__(self, space: SearchSpace, device: str = "cuda") -> None:
        """Reads the knobs of all arms. The device, `cuda` or `cpu`, decides which switches have one direction."""
        self.arms = space.arms
        self._device = device
        coarse = [dict(_leaves(arm.knobs)) for arm in self.arms]
        paths = sorted({path for leaves in coarse for path in leaves})
        values = {path: [plain(leaves.get(path)) for leaves in coarse] for path in paths}
        self._coarse = np.array(
            [
                [_distinct(values[path]).index(values[path][arm]) * _APART for path in paths]
                for arm in range(len(coarse))
            ]
        ).reshape(len(coarse), len(paths))
        without = [{path: value for path, value in leaves.items() if not is_switch(path)} for leaves in coarse]
        self._of_deepspeed = np.array([without.index(leaves) for leaves in without], dtype=np.int64)
        self._paths = sorted({knob.path for arm in self.arms for knob in arm.fine})
        self._scales = {
            path: _scale(
                [value for arm in self.arms for knob in arm.fine if knob.path == path for value in knob.values],
                path in ONE_WAY[device],
            )
            for path in self._paths
        }
        self._known: dict[tuple[int, int], Array] = {}
        self._departures: dict[tuple[int, int], int] = {}
        self._fine_costs: dict[tuple[int, int], float] = {}

    def coarse(self, arms: Iterable[int]) -> Array:
        """Returns the coarse coordinates of some arms, one row each."""
        return self._coarse[list(arms)]

    def of_deepspeed(self, arms: Iterable[int]) -> npt.NDArray[np.int64]:
        """Returns a number for the coarse DeepSpeed settings of each of some arms, whatever their switches."""
        numbers: npt.NDArray[np.int64] = self._of_deepspeed[list(arms)]
        return numbers

    def fine(self, lineages: Sequence[tuple[int, int]]) -> Array:
        """Returns the fine coordinates of some lineages, one row each."""
        return np.array([self._row(*lineage) for lineage in lineages]).reshape(len(lineages), len(self._paths))

    def locate(self, knobs: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the lineage of some knobs; None if they are not in the space."""
        for number, arm in enumerate(self.arms):
            if arm.stage == get_knob(knobs, _STAGE) and (index := arm.index(knobs)) is not None:
                return number, index
        return None

    def locate_config(self, config: Mapping[str, Any]) -> tuple[int, int] | None:
        """Returns the lineage that a complete DeepSpeed configuration belongs to, as far as the space's knobs go.

        The arm that sets most of the configuration's coarse knobs is taken. A fine knob that the configuration leaves
        open counts as DeepSpeed's default. A fine knob at a value outside the space counts as the arm's best guess.
        """
        leaves = [list(_leaves(arm.knobs)) for arm in self.arms]
        described = [
            number
            for number, of_arm in enumerate(leaves)
            if all(plain(get_knob(config, path)) == plain(value) for path, value in of_arm)
        ]
        if not described:
            return None
        number = max(described, key=lambda each: len(leaves[each]))
        index = self.arms[number].index(self.arms[number].with_fine(_shared_values(self.arms[number], config)))
        return number, index or 0

    def departures(self, lineages: Iterable[tuple[int, int]]) -> Array:
        """Returns for each lineage the number of fine knobs that are not at their best guess."""
        return np.array([self._departure(*lineage) for lineage in lineages], dtype=float)

    def fine_costs(self, lineages: Iterable[tuple[int, int]]) -> Array:
        """Returns for each lineage the expected cost of its fine knobs, as a logarithm, as far as it is known."""
        return np.array([self._fine_cost(*lineage) for lineage in lineages], dtype=float)

    def _fine_cost(self, number: int, index: int) -> float:
        known = self._fine_costs.get((number, index))
        if known is None:
            known, left = 0.0, index
            for knob in self.arms[number].fine:
                left, position = divmod(left, len(knob.values))
                known += fine_cost(knob.path, knob.values[position], knob.values, self._device)
            self._fine_costs[number, index] = known
        return known

    def _departure(self, number: int, index: int) -> int:
        known = self._departures.get((number, index))
        if known is None:
            known, left = 0, index
            for knob in self.arms[number].fine:
                left, position = divmod(left, len(knob.values))
                known += position > 0
            self._departures[number, index] = known
        return known

    def _row(self, number: int, index: int) -> Array:
        row = self._known.get((number, index))
        if row is None:
            row = np.full(len(self._paths), np.nan)
            left = index
            for knob in self.arms[number].fine:
                left, position = divmod(left, len(knob.values))
                row[self._paths.index(knob.path)] = self._scales[knob.path][repr(knob.values[position])]
            self._known[number, index] = row
        return row


def _shared_values(arm: Arm, config: Mapping[str, Any]) -> dict[str, Any]:
    shared = {}
    for knob in arm.fine:
        own = get_knob(config, knob.path, LEFT_OPEN.get(knob.path))
        if own in knob.values:
            shared[knob.path] = knob.values[knob.values.index(own)]
    return shared


def _scale(values: Sequence[Any], is_one_way: bool) -> dict[str, float]:
    distinct = _distinct(values)
    if is_one_way and None not in distinct:
        return {repr(value): rank * _ONE_WAY_STEP for rank, value in enumerate(sorted(distinct, key=float))}
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in distinct):
        last = max(1, len(distinct) - 1)
        return {repr(value): rank / last for rank, value in enumerate(sorted(distinct))}
    return {repr(value): rank * _APART for rank, value in enumerate(distinct)}


def _distinct(values: Sequence[Any]) -> list[Any]:
    return list({repr(value): value for value in values}.values())


def plain(value: Any) -> Any:
    """Returns a value. All values that switch a setting off, or leave it out, become None."""
    return None if value in _ABSENT or value == 0 else value


def _leaves(config: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
