"""What DeepSpeed refuses in a study: asked once for all switches that DeepSpeed does not read."""

import pytest
from arms_of_space import here

from trial_lib.space import refusals
from trial_lib.space.refusals import Refusals

STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configurations that the rules have been asked of."""
    configs: list[object] = []
    of = refusals.refusals_of
    monkeypatch.setattr(refusals, "refusals_of", lambda config, at: configs.append(config) or of(config, at))
    return configs


def test_arms_that_differ_in_a_switch_share_an_answer(asked: list[object]) -> None:
    found = Refusals(here(has_experts=True))
    before = len(asked)
    for value in range(50):
        assert not found.has({**STAGE_2, "program": {"--x": value}}, {"program.OWN": value})
    assert len(asked) == before + 1
    assert found.has(STAGE_2, {"zero_optimization.reduce_scatter": False})


def test_arms_that_differ_in_the_size_of_groups_have_answers_of_their_own() -> None:
    base = {"optimizer": {"type": "AdamW"}, "layouts": {"--stages": "pipeline"}}
    found = Refusals(here(base=base))
    assert not found.has({**STAGE_2, "program": {"--stages": 1}}, {})
    assert found.has({**STAGE_2, "program": {"--stages": 2}}, {})
