from trial_lib.foresee.plan.arm_runs import with_common_loading
from trial_lib.wire.foreseen_run import ForeseenRun


def test_arms_of_one_size_load_in_the_same_time_however_disturbed_one_of_them_was() -> None:
    runs = {
        "z0-mbs1-of8": ForeseenRun(world=8, micro_batch=1, loading_s=(0.9, 0.8)),
        "z1-mbs1-of8": ForeseenRun(world=8, micro_batch=1, loading_s=(0.01, 0.02, 0.03)),
        "z1-mbs2-of8": ForeseenRun(world=8, micro_batch=2, loading_s=(0.04,)),
    }
    loading = {name: run.loading_s for name, run in with_common_loading(runs).items()}
    assert loading == {"z0-mbs1-of8": (0.03,), "z1-mbs1-of8": (0.03,), "z1-mbs2-of8": (0.04,)}


def test_a_program_whose_loading_was_not_seen_has_no_loading_time() -> None:
    assert with_common_loading({"z0-mbs1-of8": ForeseenRun(world=8)})["z0-mbs1-of8"].loading_s == ()
