"""Products by groups have formulas, whatever a version of transformers has of its operators."""

from types import SimpleNamespace

import pytest

from zerotune.trial_lib.rank import flops


@pytest.mark.parametrize(
    "names", [(), ("grouped_mm_fallback",), ("grouped_mm_fallback", "grouped_mm_fallback_backward")]
)
def test_a_version_without_an_operator_has_the_others(monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...]) -> None:
    operators = SimpleNamespace(aten=SimpleNamespace(), transformers=SimpleNamespace(**{name: name for name in names}))
    monkeypatch.setattr(flops, "torch", SimpleNamespace(ops=operators))
    assert tuple(flops.grouped_products()) == names
