"""A model of many layers from two runs with few: the settings under which its bytes are lines in the layers. Pure.

A line in the layers holds for all that grows with them, and for all that stays. ZeRO's third stage updates a rank's
share of the parameters in pieces of `sub_group_size` elements (deepspeed/runtime/zero/stage3.py,
`_create_fp16_sub_groups`). The share of few layers may be one piece and that of all layers several. So the run of few
layers has pieces that are as much smaller as its model is. Then they grow with the layers, up to those of the whole.
"""

from collections.abc import Mapping
from typing import Any

SUB_GROUP = 10**9
"""DeepSpeed's default of `sub_group_size` (deepspeed/runtime/zero/config.py), elements of one rank's share."""


def zero_of_few(zero: Mapping[str, Any], few: int, whole: int) -> dict[str, Any]:
    """Returns the `zero_optimization` of a run with few layers.

    Args:
        zero: that of the whole model.
        few: parameters of the model with few layers.
        whole: parameters of the whole model.
    """
    if zero.get("stage") != 3 or few >= whole:
        return dict(zero)
    return {**zero, "sub_group_size": max(1, round(zero.get("sub_group_size", SUB_GROUP) * few / whole))}
