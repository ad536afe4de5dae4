"""The predecessor's lists on the command line are separated by spaces."""

import pytest

from flows.arguments import spread_lists


@pytest.mark.parametrize(
    ("typed", "parsed"),
    [
        ("asha a.yaml m -z 0 1", "asha a.yaml m -z 0 -z 1"),
        ("asha a.yaml m --zero-stages 2 3 -mt 5", "asha a.yaml m --zero-stages 2 --zero-stages 3 -mt 5"),
        ("asha -z 1 a.yaml m", "asha -z 1 a.yaml m"),
        ("asha a.yaml m -i lib utils.py -m latency", "asha a.yaml m -i lib -i utils.py -m latency"),
        ("asha a.yaml m --include lib -z 3", "asha a.yaml m --include lib -z 3"),
        ("asha a.yaml m --include=lib", "asha a.yaml m --include=lib"),
        ("asha a.yaml m -z", "asha a.yaml m -z"),
        ("asha a.yaml m -z --json", "asha a.yaml m -z --json"),
    ],
)
def test_a_list_is_written_as_one_option_for_each_value(typed: str, parsed: str) -> None:
    assert spread_lists(typed.split()) == parsed.split()
