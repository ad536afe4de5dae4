import pytest

from zerotune.trial_lib.messages.errors import plain


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[31mred\x1b[0m", "red"),
        ("\x1b]0;a new title\x07text", "text"),
        ("\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\", "link"),
        ("\x1b]52;c;cm0gLXJm\x07", ""),
        ("\x9b2Jgone \x1bc\x1b(B", "gone "),
        ("a\x00b\x08c\x7f", "abc"),
        ("one\r\ntwo\tthree", "one\ntwo\tthree"),
        ("user\u202etxt.exe", "usertxt.exe"),
        ("not \udcff UTF-8", "not \ufffd UTF-8"),
        ("ünï 日本", "ünï 日本"),
        ("\x1b", ""),
    ],
)
def test_a_terminal_has_nothing_to_obey(text: str, shown: str) -> None:
    assert plain(text) == shown
