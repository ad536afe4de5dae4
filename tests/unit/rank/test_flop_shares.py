"""When the counts of several ranks are no figure of one model."""

import pytest

from zerotune.trial_lib.rank.flops import FlopShare, are_shares_of_one


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param([(600.0, 64)], id="one rank"),
        pytest.param([(600.0, 64), (600.0, 64)], id="alike"),
        pytest.param([(600.0, 64), (1200.0, 128)], id="twice the tokens"),
        pytest.param([(600.0, 64), (2400.0, 128)], id="twice the tokens, all of it attention"),
        pytest.param([(2400.0, 128), (600.0, 64)], id="the longer first"),
        pytest.param([(600.0, 64), (500.0, 64)], id="a layer left out"),
        pytest.param([(600.0, 0), (600.0, 0)], id="inputs that are no tensors"),
    ],
)
def test_what_the_sizes_of_samples_explain_is_one_figure(shares: list[tuple[float, float]]) -> None:
    assert are_shares_of_one([FlopShare(*each) for each in shares])


@pytest.mark.parametrize(
    "shares",
    [
        pytest.param([(600.0, 64), (200.0, 64)], id="no backward pass"),
        pytest.param([(600.0, 64), (200.0, 128)], id="less for more tokens"),
        pytest.param([(600.0, 64), (60000.0, 128)], id="far more than attention is"),
        pytest.param([(600.0, 64), (600.0, 64), (10.0, 64)], id="one of several"),
    ],
)
def test_a_rank_that_is_further_off_counts_something_else(shares: list[tuple[float, float]]) -> None:
    assert not are_shares_of_one([FlopShare(*each) for each in shares])
    assert not are_shares_of_one([FlopShare(*each) for each in reversed(shares)])
