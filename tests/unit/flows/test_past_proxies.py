"""Loopback goes through no proxy, by whichever name a program reads the exceptions."""

from urllib.request import proxy_bypass

import pytest

from zerotune.flows.prefect_server import past_proxies


@pytest.mark.parametrize(("name", "own"), [("no_proxy", "a.example"), ("NO_PROXY", "a.example"), ("no_proxy", "*")])
def test_loopback_is_added_to_what_the_user_has(name: str, own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv(name, own)
    for variable, value in past_proxies().items():
        monkeypatch.setenv(variable, value)
    for host in ("a.example", "127.0.0.1:4200"):
        assert proxy_bypass(host)


def test_loopback_is_the_only_exception_where_the_user_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(variable, raising=False)
    assert past_proxies() == {"NO_PROXY": "127.0.0.1", "no_proxy": "127.0.0.1"}
