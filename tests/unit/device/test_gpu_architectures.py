"""Which architectures of torch DeepSpeed cannot read, and where a rank says so."""

import pytest

from zerotune.trial_lib.device.cuda_variables import ARCHITECTURES, unread_architectures
from zerotune.trial_lib.rank.endings import named_refusal


@pytest.mark.parametrize("value", ["", "9.0", "8.0;9.0+PTX", "7.5 8.6  9.0", "10.0; 12.0"])
def test_numbers_are_read(value: str) -> None:
    assert unread_architectures({ARCHITECTURES: value}) == ""


@pytest.mark.parametrize(
    ("value", "unread"), [("9.0a", "9.0a"), ("8.0 Hopper", "Hopper"), ("10.0f;9.0a", "10.0f, 9.0a")]
)
def test_other_spellings_of_torch_are_not(value: str, unread: str) -> None:
    assert unread_architectures({ARCHITECTURES: value}).startswith(
        f"{ARCHITECTURES} has {unread}. DeepSpeed builds its ops"
    )


def test_nothing_is_said_without_the_variable() -> None:
    assert unread_architectures({}) == ""


def test_a_rank_names_the_variable_behind_an_error_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="invalid literal") as caught:
        int("0a")
    monkeypatch.setenv(ARCHITECTURES, "9.0")
    assert named_refusal(caught.value) == ""
    monkeypatch.setenv(ARCHITECTURES, "9.0a")
    assert named_refusal(caught.value).startswith(f"{ARCHITECTURES} has 9.0a.")
    assert named_refusal(ValueError("another")) == ""
