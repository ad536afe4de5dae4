"""When the FLOPs of a profile are counted."""

from types import SimpleNamespace
from typing import Any

import pytest

from zerotune.trial_lib.rank import surveys
from zerotune.trial_lib.rank.surveys import FlopSurvey


class Profile:
    """A profile whose step is measured.

    Attributes:
        happened: what the survey has done, in order.
    """

    def __init__(self, elsewhere: float = 0.0, **engine: Any) -> None:
        self.happened: list[str] = []
        model = SimpleNamespace(count_flops=lambda: self.happened.append("counts"))
        watch: Any = SimpleNamespace(model=model, engine=SimpleNamespace(**engine))
        self._survey = FlopSurvey(
            watch, lambda values: [max(value, elsewhere) for value in values], lambda: self.happened.append("keeps")
        )

    def train(self, holds_other_batches: bool = False) -> list[str]:
        """Trains for as long as the survey wants to."""
        while self._survey.step_ended(holds_other_batches):
            self.happened.append("step")
        return self.happened


def test_what_is_known_is_kept_before_the_step_that_is_counted() -> None:
    assert Profile().train() == ["keeps", "counts", "step"]


def test_a_batch_that_was_made_longer_goes_by_first() -> None:
    assert Profile().train(holds_other_batches=True) == ["keeps", "step", "counts", "step"]


@pytest.mark.parametrize(
    "profile",
    [Profile(elsewhere=1.0), Profile(is_deepcompile_active=lambda: True)],
    ids=["another rank cannot", "DeepCompile"],
)
def test_where_any_rank_cannot_run_uncompiled_nothing_is_counted(profile: Profile) -> None:
    assert profile.train() == []


def test_an_older_torch_counts_what_is_not_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("torch.compiler.set_stance")
    monkeypatch.setattr("zerotune.trial_lib.rank.torch_functions.compilations", lambda: 0)
    assert surveys.can_run_eagerly()
    monkeypatch.setattr("zerotune.trial_lib.rank.torch_functions.compilations", lambda: 1)
    assert not surveys.can_run_eagerly()
