"""What an engine shows of the precision that it keeps its model in, and computes in."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from zerotune.trial_lib.rank.flops import FlopCounter, SavedActivations
from zerotune.trial_lib.rank.memory import bytes_by_code, formats, names, settled


def engine(module: torch.nn.Module | None = None, half: str = "", device: str = "cpu") -> Any:
    """An engine as DeepSpeed's answers (`runtime/engine.py`, 0.19.8)."""
    return SimpleNamespace(
        module=torch.nn.Linear(4, 4) if module is None else module,
        device=torch.device(device),
        fp16_enabled=lambda: half == "fp16",
        bfloat16_enabled=lambda: half == "bf16",
        zero_reduce_bucket_size=lambda: 4096,
    )


def test_what_the_trainer_fills_in_is_read_off_the_engine() -> None:
    assert settled(engine(half="bf16")) == {
        "fp16": {"enabled": False},
        "bf16": {"enabled": True},
        "bfloat16": {"enabled": True},
        "amp": {"enabled": False},
        "zero_optimization": {"reduce_bucket_size": 4096},
    }


def test_parameters_show_in_which_formats_they_are_kept() -> None:
    assert formats(engine()) == {"float32"}
    mixed = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4).bfloat16())
    assert formats(engine(mixed)) == {"bfloat16", "float32"}


def test_autocast_shows_while_it_is_on() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert formats(engine()) == {"bfloat16", "float32"}
    assert formats(engine()) == {"float32"}


def test_what_a_forward_pass_keeps_shows_an_autocast_within_it() -> None:
    layer = torch.nn.Linear(4, 4)
    with SavedActivations() as saved, torch.autocast("cpu", torch.bfloat16):
        layer(torch.ones(2, 4))
    assert names(saved.dtypes) == {"bfloat16"}


def test_what_is_multiplied_shows_an_autocast_of_which_nothing_is_kept() -> None:
    layer = torch.nn.Linear(4, 4)

    def in_autocast(inputs: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return layer(inputs).float()

    with FlopCounter() as counter, SavedActivations() as saved:
        checkpoint(in_autocast, torch.ones(2, 4), use_reentrant=False)
    assert "bfloat16" not in names(saved.dtypes)
    assert names(counter.dtypes) == {"bfloat16"}


def tf32_of(monkeypatch: pytest.MonkeyPatch, module: torch.nn.Module, capability: tuple[int, int]) -> bool:
    """Returns whether a made-up GPU multiplies in TF32."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capability)
    return "tf32" in formats(engine(module, device="cuda:0"))


@pytest.mark.parametrize("capability", [(7, 5), (9, 0)])
def test_tf32_shows_where_the_gpu_has_it_and_the_code_allows_it(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int]
) -> None:
    linear, convolution = torch.nn.Linear(4, 4), torch.nn.Conv1d(1, 1, 1)
    has_it = capability >= (8, 0)
    assert not tf32_of(monkeypatch, linear, capability)
    # For convolutions it is torch's default.
    assert tf32_of(monkeypatch, convolution, capability) == has_it
    allowed = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        assert tf32_of(monkeypatch, linear, capability) == has_it
    finally:
        torch.set_float32_matmul_precision(allowed)


def test_the_bytes_of_a_parameter_are_the_code_s_where_no_section_decides() -> None:
    assert bytes_by_code(engine()) == 4
    assert bytes_by_code(engine(torch.nn.Linear(4, 4).bfloat16())) == 2
    adapted = torch.nn.Sequential(torch.nn.Linear(64, 64).bfloat16(), torch.nn.Linear(2, 2))
    assert bytes_by_code(engine(adapted)) == 2
    assert bytes_by_code(engine(torch.nn.Linear(4, 4).bfloat16(), half="bf16")) is None
    assert bytes_by_code(engine(torch.nn.Identity())) is None
