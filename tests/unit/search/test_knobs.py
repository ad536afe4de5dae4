import pytest

from zerotune.trial_lib.search.knobs import SearchSpace

LARGE = 10**11


def paths(stage, num_params=LARGE):
    (arm,) = SearchSpace.for_model([stage], num_params).arms
    return {knob.path.removeprefix("zero_optimization.") for knob in arm.fine}


def test_stage_0_varies_nothing_but_the_size():
    space = SearchSpace.for_model([0], LARGE)
    assert space.size(0) == 1
    assert space.family(0, 0) == {"zero_optimization": {"stage": 0}}


def test_stage_1_varies_the_two_buckets_and_stage_2_adds_three_switches():
    assert paths(1) == {"reduce_bucket_size", "allgather_bucket_size"}
    assert paths(2) == paths(1) | {"overlap_comm", "reduce_scatter", "contiguous_gradients"}


def test_stage_3_does_not_vary_what_it_never_reads():
    assert paths(3) == paths(2) - {"allgather_bucket_size"}
    assert "allgather_partitions" not in paths(3)


def test_buckets_are_1_and_5_times_the_powers_of_ten_from_a_million_to_a_billion():
    bucket = SearchSpace.for_model([1], LARGE).arms[0].fine[0]
    assert bucket.values == (10**6, 5 * 10**6, 10**7, 5 * 10**7, 10**8, 5 * 10**8, 10**9, 5 * 10**9)
    assert [SearchSpace.for_model([s], LARGE).size(s) for s in (1, 2, 3)] == [64, 512, 64]


def test_a_bucket_is_never_larger_than_the_model_and_equal_ones_are_one():
    space = SearchSpace.for_model([1, 2, 3], 7_000_000)
    assert space.arms[0].fine[0].values == (10**6, 5 * 10**6, 7 * 10**6)
    assert [space.size(stage) for stage in space.stages] == [9, 72, 24]
    assert SearchSpace.for_model([1], 400_000).size(1) == 1


def test_stages_are_ascending_and_distinct():
    assert SearchSpace.for_model([3, 1, 3], LARGE).stages == (1, 3)


@pytest.mark.parametrize("stage", [0, 1, 2, 3])
def test_a_stage_has_as_many_distinct_families_as_its_size(stage):
    space = SearchSpace.for_model([stage], LARGE)
    families = [space.family(stage, index) for index in range(space.size(stage))]
    assert len({repr(family) for family in families}) == space.size(stage)
    assert [space.index(family) for family in families] == list(range(space.size(stage)))


def test_knobs_of_no_family_have_no_index():
    space = SearchSpace.for_model([1, 2], LARGE)
    family = space.family(1, 3)
    assert space.index({}) is None
    assert space.index({"zero_optimization": {"stage": 3}}) is None
    assert space.index({"zero_optimization": {"stage": 1}}) is None
    assert space.index({**family, "optimizer": {"type": "SGD"}}) is None
