"""The methods by name."""

from collections.abc import Callable, Mapping
from typing import Any

from trial_lib.experiment.knobs import SearchSpace
from trial_lib.experiment.result import ModelProfile
from trial_lib.search.asha import AshaSearch, AshaSettings
from trial_lib.search.base import Search, SearchProblem, SearchSettings
from trial_lib.search.binary import BinarySearch, BinarySettings
from trial_lib.search.micro_batch import MicroBatchSearch
from trial_lib.search.random import RandomSearch, RandomSettings

SETTINGS: dict[str, type[SearchSettings]] = {
    "asha": AshaSettings,
    "binary": BinarySettings,
    "random": RandomSettings,
    "micro_batch": SearchSettings,
}

_SEARCHES: dict[str, Callable[..., Search]] = {
    "asha": AshaSearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "micro_batch": MicroBatchSearch,
}


def create_search(
    method: str,
    settings: Mapping[str, Any],
    *,
    profile: ModelProfile,
    base_config: Mapping[str, Any],
    slots: int,
) -> Search:
    """Returns a search that has asked for nothing yet.

    Args:
        method: a name of `SETTINGS`.
        settings: what the method's settings are told, as JSON has it; the rest has its default.
        profile: what the profile trial found out.
        base_config: the user's DeepSpeed configuration.
        slots: devices a trial takes.

    Raises:
        pydantic.ValidationError: a setting is unknown to the method or out of its range.
    """
    checked = SETTINGS[method](**settings)
    space = SearchSpace.for_model(checked.zero_stages, profile.num_params, base_config)
    return _SEARCHES[method](checked, SearchProblem(space, profile, base_config, slots))
