"""What Ray counts on its nodes, beside what they may use."""

import pytest

from zerotune.trial_lib.device.base import Host
from zerotune.trial_lib.messages.errors import InputError

pytest.importorskip("ray", reason="the extra `ray` is not installed")
from zerotune.trial_lib.launch.ray_cluster import check_processors

TWO = Host("cpu", ["0", "1"], 2**30)


def test_a_node_of_which_ray_counts_more_processors_than_it_may_use_is_refused() -> None:
    with pytest.raises(InputError, match="Ray counts 4 processors on a node that may use 2") as refused:
        check_processors([2, 4], [TWO, TWO])
    assert refused.value.remedy == "Start it with `ray start --num-cpus 2`."


def test_a_node_may_be_started_with_fewer() -> None:
    check_processors([1, 2], [TWO, TWO])
