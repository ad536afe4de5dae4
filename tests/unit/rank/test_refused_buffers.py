"""What DeepSpeed says when parameters from NVMe fill its buffers gets a remedy."""

import pytest

from zerotune.trial_lib.rank.endings import named_refusal


@pytest.mark.parametrize("said", ["Not enough buffers 0 for swapping 1", "param 38 already assigned swap buffer id 10"])
def test_the_remedy_is_that_deepspeed_keeps_none(said: str) -> None:
    assert "`stage3_max_live_parameters: 0` and `stage3_max_reuse_distance: 0`" in named_refusal(AssertionError(said))


@pytest.mark.parametrize(
    "other", [AssertionError("Not enough data"), ValueError("Not enough buffers 0 for swapping 1")]
)
def test_other_errors_keep_their_words(other: Exception) -> None:
    assert named_refusal(other) == ""


def allocate(pinned_buffers: object) -> None:
    assert pinned_buffers is not None


def test_an_optimizer_needs_more_of_them() -> None:
    with pytest.raises(AssertionError) as without_words:
        allocate(None)
    without_words.value.args = ()  # pytest writes words of its own
    for error in (without_words.value, AssertionError("PipelinedOptimizerSwapper ran out of swap buffers")):
        assert "`buffer_count` of offload_optimizer to 4" in named_refusal(error)
