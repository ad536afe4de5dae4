"""A second backward pass for one step is noticed where DeepSpeed does not expect it."""

from types import SimpleNamespace

import pytest

from zerotune.trial_lib.rank.engine_watch import BackwardPasses


class Engine(SimpleNamespace):
    """An engine as far as its accumulation goes."""

    at_boundary = True
    inside_no_sync_ctxt = False

    def is_gradient_accumulation_boundary(self) -> bool:
        return self.at_boundary


def times_told(engine: Engine, *calls: str) -> int:
    told: list[bool] = []
    passes = BackwardPasses(engine, lambda: told.append(True))
    for call in calls:
        passes.begin() if call == "backward" else passes.end()
    return len(told)


def test_one_backward_pass_for_each_step_is_nothing_to_tell() -> None:
    assert times_told(Engine(), *(["backward", "step"] * 3)) == 0


def test_a_second_one_before_the_step_is_told_once_for_that_step() -> None:
    assert times_told(Engine(), "backward", "backward", "backward", "step") == 1


@pytest.mark.parametrize("state", [{"at_boundary": False}, {"inside_no_sync_ctxt": True}])
def test_passes_of_which_deepspeed_knows_that_more_follow_are_its_own_matter(state: dict[str, bool]) -> None:
    assert times_told(Engine(**state), "backward", "backward", "step") == 0
