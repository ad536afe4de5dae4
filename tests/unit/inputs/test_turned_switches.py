"""Switches that ZeroTune turns, as a user asks for them."""

from typing import Any

import pytest

from zerotune.trial_lib.inputs.search_space import read_search_space, read_vary
from zerotune.trial_lib.messages.errors import InputError


def test_a_switch_without_values_has_all_of_them_and_is_coarse_by_its_table() -> None:
    section = read_vary(["model:compile", "model:attention=sdpa,eager"])
    assert section == {"model:compile": [False, True], "model:attention": ["sdpa", "eager"]}
    requests = read_search_space({"program": section})
    assert [(each.path, each.values, each.coarse) for each in requests] == [
        ("program.model:compile", (False, True), True),
        ("program.model:attention", ("sdpa", "eager"), True),
    ]


@pytest.mark.parametrize(
    ("said", "problem", "remedy"),
    [
        ({"model:compil": [True]}, "no switch model:compil", "Did you mean model:compile?"),
        ({"model:compile": ["inductor"]}, "model:compile cannot be inductor", "Its values are false, true."),
        ({"model:attention": ["flash"]}, "model:attention cannot be flash", "eager, sdpa"),
    ],
)
def test_a_name_or_a_value_that_zerotune_lacks_is_refused(said: dict[str, Any], problem: str, remedy: str) -> None:
    with pytest.raises(InputError) as refused:
        read_search_space({"program": said})
    assert problem in str(refused.value)
    assert remedy in str(refused.value)
