"""Attention that a foreseen run has in the place of another kernel."""

import types

import pytest
import torch

from trial_lib.plan.simulate import fused_kernels


@pytest.mark.parametrize(
    ("asked", "is_padded"), [("flash_attention_2", True), ("flash_attention_2", False), ("sdpa", True)]
)
def test_a_kernel_that_skips_padding_is_said_to_be_foreseen_with_a_mask(
    monkeypatch: pytest.MonkeyPatch, asked: str, is_padded: bool
) -> None:
    class PreTrainedModel:
        def _check_and_adjust_attn_implementation(self, attn_implementation: str) -> str:
            return attn_implementation

    monkeypatch.setattr(fused_kernels, "_asked", [])
    monkeypatch.setattr(fused_kernels, "notes", set())
    module = types.ModuleType("transformers.modeling_utils")
    module.PreTrainedModel = PreTrainedModel  # type: ignore[attr-defined]
    fused_kernels._choose_own_kernel(module)
    assert PreTrainedModel()._check_and_adjust_attn_implementation(asked) == "sdpa"
    heads = torch.empty(2, 4, 8, 16, dtype=torch.bfloat16, device="meta")
    mask = torch.ones(2, 1, 8, 8, dtype=torch.bool, device="meta") if is_padded else None
    fused_kernels.attention(heads, heads, heads, mask)
    expected = {fused_kernels._MASKED.format(asked)} if is_padded and asked != "sdpa" else set()
    assert fused_kernels.notes == expected
