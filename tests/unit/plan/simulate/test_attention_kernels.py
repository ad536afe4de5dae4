"""Attention that a foreseen run has in the place of another kernel."""

import sys
import types

import pytest
import torch

from zerotune.trial_lib.plan.simulate import libraries
from zerotune.trial_lib.rank.patching import installed


@pytest.mark.parametrize(
    ("asked", "is_padded"), [("flash_attention_2", True), ("flash_attention_2", False), ("sdpa", True)]
)
def test_a_kernel_that_skips_padding_is_said_to_be_foreseen_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, asked: str, is_padded: bool
) -> None:
    class PreTrainedModel:
        def _check_and_adjust_attn_implementation(self, attn_implementation: str) -> str:
            return attn_implementation

    monkeypatch.setattr(libraries, "_asked", [])
    notes: set[str] = set()
    module = types.ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with installed([row for row in libraries.PATCHES if row.what.startswith("PreTrainedModel._check")]):
        assert PreTrainedModel()._check_and_adjust_attn_implementation(asked) == "sdpa"
    heads = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device="meta") if is_padded else None
    libraries.attention(notes, heads, heads, heads, mask)
    assert notes == ({libraries._MASKED.format(asked)} if is_padded and asked != "sdpa" else set())
