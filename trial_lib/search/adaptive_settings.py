"""What `adaptive` can be told."""

from typing import Annotated

from pydantic import Field, NonNegativeFloat, PositiveInt

from trial_lib.search.base import SearchSettings, ZeroStages


class AdaptiveSettings(SearchSettings):
    """What `adaptive` can be told.

    Attributes:
        zero_stages: ZeRO stages that may be used.
        divisible_by: every micro-batch size (samples) is a multiple of it.
        memory_headroom: share of a device's memory that is to stay free.
        min_gain: the search ends when no trial is expected to bring more than this share.
    """

    zero_stages: ZeroStages = (0, 1, 2, 3)
    divisible_by: PositiveInt = 1
    memory_headroom: Annotated[float, Field(ge=0, lt=1)] = 0.05
    min_gain: NonNegativeFloat = 0.0005
