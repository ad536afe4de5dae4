"""The decoder that stands for public measurements."""

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from benchmarks.foresee.public_gpus.decoder import Decoder
from benchmarks.foresee.public_gpus.divided import Divided
from benchmarks.foresee.public_gpus.model_of_row import RowProgram

SMALL = RowProgram(
    family="decoder",
    layers=2,
    hidden=32,
    heads=4,
    kv_heads=2,
    ffn=48,
    vocab=50,
    tokens=16,
    is_gated=True,
    is_tied=False,
    has_positions=False,
    attention="fused",
    checkpoints=False,
)


def model_of(program: RowProgram) -> Decoder:
    plain = SimpleNamespace(**program.to_json())
    return Decoder(plain, Divided(plain))


def gradients(program: RowProgram) -> tuple[float, list[torch.Tensor]]:
    torch.manual_seed(3)
    model = model_of(program)
    loss = model(torch.arange(32).view(2, 16))
    loss.backward()
    return loss.item(), [each.grad for each in model.parameters() if each.grad is not None]


AGAIN = [
    {"compiled": True},
    {"checkpoints": True},
    {"checkpoints": True, "checkpoint_every": 2},
    {"loss": "chunked"},
    {"loss": "fused"},
]


@pytest.mark.parametrize("change", AGAIN)
def test_what_is_computed_again_does_not_change_the_gradients(change: dict[str, object]) -> None:
    loss, plain = gradients(SMALL)
    changed_loss, changed = gradients(replace(SMALL, **change))  # type: ignore[arg-type]
    assert changed_loss == pytest.approx(loss, rel=1e-5)
    assert len(plain) == len(changed)
    assert all(torch.allclose(one, other, atol=1e-5) for one, other in zip(plain, changed, strict=True))


def test_a_compiled_program_keeps_less_for_the_backward_pass() -> None:
    def kept(program: RowProgram) -> int:
        sizes: dict[int, int] = {}

        def note(tensor: torch.Tensor) -> torch.Tensor:
            sizes[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        model = model_of(program)
        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            model(torch.arange(32).view(2, 16))
        return sum(sizes.values())

    assert kept(replace(SMALL, compiled=True)) < kept(SMALL)
    assert kept(replace(SMALL, checkpoints=True)) < kept(SMALL)


@pytest.mark.parametrize("gated", [True, False])
def test_the_model_has_the_parameters_of_its_program(gated: bool) -> None:
    program = replace(SMALL, is_gated=gated, has_positions=not gated, hidden=128, ffn=256)
    model = model_of(program)
    assert sum(each.numel() for each in model.parameters()) == pytest.approx(program.parameters, rel=0.03)
