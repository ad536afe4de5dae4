"""What follows `--` belongs to the user's command, to the last character."""

import pytest

from flows.arguments import cut_off_command, spread_lists
from trial_lib.experiment.errors import InputError


def test_the_words_behind_the_first_dashes_are_the_command() -> None:
    words = ["tune", "-z", "1", "2", "--", "python", "train.py", "-z", "1", "2", "--", "", "--include", "a", "b"]
    own, command = cut_off_command(words)
    assert spread_lists(own) == ["tune", "-z", "1", "-z", "2"]
    assert command == ("python", "train.py", "-z", "1", "2", "--", "", "--include", "a", "b")


def test_other_commands_stay_as_they_are() -> None:
    words = ["asha", "experiment.yaml", "--", "model"]
    assert cut_off_command(words) == (words, ())
    assert cut_off_command([]) == ([], ())


def test_help_needs_no_command() -> None:
    assert cut_off_command(["micro-batch", "--help"]) == (["micro-batch", "--help"], ())


@pytest.mark.parametrize("words", [["tune"], ["tune", "python", "train.py"], ["micro-batch", "-mt", "3", "--"]])
def test_a_missing_command_is_told(words: list[str]) -> None:
    with pytest.raises(InputError) as refused:
        cut_off_command(words)
    assert refused.value.where == f"zerotune {words[0]}"
    assert "`--`" in refused.value.what
