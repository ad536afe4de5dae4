from dataclasses import replace

from simulated_model import PROFILE, Model, asked, drive, failed, ran, search, sizes_by_family


def first_of_stage_0(**settings):
    """Stage 0 has no knobs, so one family; its first guess is (80 - 40 - 0.4 - 0.8) GB / 1 GB = 38 samples."""
    return search("binary", zero_stages=(0,), **settings)


def test_the_first_size_is_the_middle_of_1_and_the_first_guess():
    assert first_of_stage_0().ask().micro_batch_size == (1 + 38) // 2


def test_search_range_factor_scales_the_upper_end():
    assert first_of_stage_0(search_range_factor=2.0).ask().micro_batch_size == (1 + 76) // 2
    assert first_of_stage_0(search_range_factor=0.001).ask().micro_batch_size == 1


def test_success_raises_the_lower_end_above_the_size():
    tuner = first_of_stage_0()
    tuner.tell(tuner.ask(), ran())
    assert tuner.ask().micro_batch_size == (20 + 38) // 2


def test_out_of_memory_lowers_the_upper_end_below_the_size():
    tuner = first_of_stage_0()
    tuner.tell(tuner.ask(), failed())
    assert tuner.ask().micro_batch_size == (1 + 18) // 2


def test_a_family_ends_at_the_largest_size_that_runs():
    for limit in range(39):
        tuner = first_of_stage_0()
        sizes = [candidate.micro_batch_size for candidate in asked(drive(tuner, Model({0: limit}).run))]
        assert limit in sizes or limit == 0
        assert tuner.finished
        assert len(sizes) <= 6


def test_a_failure_at_the_lowest_size_ends_the_family():
    tuner = search("binary", profile=replace(PROFILE, gpu_mem=1))  # a first guess of 1
    first = tuner.ask()
    assert first.micro_batch_size == 1
    tuner.tell(first, failed())
    assert tuner.ask().family != first.family


def test_a_finished_family_is_replaced_by_a_new_random_one():
    history = drive(search("binary"), Model().run)
    families = list(sizes_by_family(history).values())
    assert len(families) > 5
    assert all(len(sizes) <= 7 for sizes in families)


def test_an_unfinished_family_goes_on_before_a_new_one_starts():
    tuner = search("binary", concurrency=2)
    first, second = tuner.ask(), tuner.ask()
    tuner.tell(second, ran())
    tuner.tell(first, ran())
    assert tuner.ask().family == second.family
    assert tuner.ask().family == first.family
