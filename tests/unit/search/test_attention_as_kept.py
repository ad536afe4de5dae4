"""What PyTorch keeps for the backward pass of attention, by the way in which it is computed."""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def as_written(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """Attention as Hugging Face's `eager` computes it."""
    scores = torch.matmul(query, key.transpose(2, 3)) * query.shape[-1] ** -0.5
    return torch.matmul(functional.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype), value)


def by(backend: SDPBackend) -> Attention:
    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(query, key, value)

    return attend


def kept_bytes(attend: Attention, dtype: torch.dtype) -> int:
    inputs = [torch.ones(2, 4, 256, 64, dtype=dtype, requires_grad=True) for _ in range(3)]
    seen: dict[int, torch.Tensor] = {}

    def keep(saved: torch.Tensor) -> torch.Tensor:
        return seen.setdefault(saved.untyped_storage().data_ptr(), saved)

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda saved: saved):
        attend(*inputs)
    own = {each.untyped_storage().data_ptr() for each in inputs}
    return sum(saved.untyped_storage().nbytes() for place, saved in seen.items() if place not in own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_sdpa_without_a_fused_kernel_keeps_more_than_attention_as_written(dtype: torch.dtype) -> None:
    written, fused = kept_bytes(as_written, dtype), kept_bytes(by(SDPBackend.FLASH_ATTENTION), dtype)
    assert kept_bytes(by(SDPBackend.MATH), dtype) > written > 2 * fused
