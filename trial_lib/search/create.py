"""The methods by name."""

from collections.abc import Callable, Mapping
from typing import Any

from trial_lib.search.adaptive import AdaptiveSearch
from trial_lib.search.adaptive_settings import AdaptiveSettings
from trial_lib.search.asha import AshaSearch, AshaSettings
from trial_lib.search.base import Search, SearchProblem, SearchSettings
from trial_lib.search.binary import BinarySearch, BinarySettings
from trial_lib.search.micro_batch import MicroBatchSearch
from trial_lib.search.random import RandomSearch, RandomSettings

SETTINGS: dict[str, type[SearchSettings]] = {
    "adaptive": AdaptiveSettings,
    "asha": AshaSettings,
    "binary": BinarySettings,
    "random": RandomSettings,
    "micro_batch": SearchSettings,
}

_SEARCHES: dict[str, Callable[..., Search]] = {
    "adaptive": AdaptiveSearch,
    "asha": AshaSearch,
    "binary": BinarySearch,
    "random": RandomSearch,
    "micro_batch": MicroBatchSearch,
}


def create_search(method: str, settings: Mapping[str, Any], problem: SearchProblem) -> Search:
    """Returns a search that has asked for nothing yet.

    Args:
        method: a name of `SETTINGS`.
        settings: what the method's settings are told, as JSON has it; the rest has its default.
        problem: what the search is about.

    Raises:
        pydantic.ValidationError: a setting is unknown to the method or out of its range.
    """
    return _SEARCHES[method](SETTINGS[method](**settings), problem)
