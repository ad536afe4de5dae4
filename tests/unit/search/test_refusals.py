"""What DeepSpeed refuses in a study: asked once for all switches that DeepSpeed does not read."""

import pytest
from arms_of_space import here

from zerotune.trial_lib.search import arms
from zerotune.trial_lib.search.arms import Refusals

STAGE_2 = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The configurations that the rules have been asked of."""
    configs: list[object] = []
    of = arms.refusals_of
    monkeypatch.setattr(arms, "refusals_of", lambda config, at: configs.append(config) or of(config, at))
    return configs


def test_arms_that_differ_in_a_switch_share_an_answer(asked: list[object]) -> None:
    found = Refusals(here(has_experts=True))
    before = len(asked)
    for value in range(50):
        assert not found.has({**STAGE_2, "program": {"--x": value}}, {"program.OWN": value})
    assert len(asked) == before + 1
    assert found.has(STAGE_2, {"zero_optimization.reduce_scatter": False})


def test_autoep_trains_at_stage_3_without_zero_plus_plus_and_needs_what_other_experts_need() -> None:
    stage_3 = {"train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 3}}
    autoep, native = (here(has_experts=True, by_autoep=is_auto) for is_auto in (True, False))
    assert "experts_at_stage_3" in arms.refusals_of(stage_3, native)
    assert not arms.refusals_of(stage_3, autoep)
    for name, value in {"zero_hpz_partition_size": 2, "zero_quantized_gradients": True}.items():
        config = {"zero_optimization": {"stage": 3, name: value}}
        assert "autoep_at_stage_3" in arms.refusals_of(config, autoep)
    without = {"zero_optimization": {"stage": 2, "contiguous_gradients": False}}
    assert any("contiguous_gradients" in name for name in arms.refusals_of(without, autoep))


def test_arms_that_differ_in_the_size_of_groups_have_answers_of_their_own() -> None:
    base = {"optimizer": {"type": "AdamW"}, "layouts": {"--stages": "pipeline"}}
    found = Refusals(here(base=base))
    assert not found.has({**STAGE_2, "program": {"--stages": 1}}, {})
    assert found.has({**STAGE_2, "program": {"--stages": 2}}, {})
