"""The door of ZeroTune's own servers, request by request."""

import asyncio
import json
from base64 import b64encode
from typing import Any

import pytest

from zerotune.flows.own_server import OwnersOnly, drawn_credential, entry_link

CREDENTIAL = "zerotune:the-key"
OWNERS = {"Authorization": f"Basic {b64encode(CREDENTIAL.encode()).decode()}"}
LOGIN = {"type": "websocket.receive", "text": json.dumps({"type": "auth", "token": CREDENTIAL})}


def request(path: str = "/api/flows", method: str = "GET", host: str = "127.0.0.1:4200", **headers: str) -> int:
    """Returns the status of the answer. It is 200 if the application was reached."""
    return int(sent({"type": "http", "path": path, "method": method}, [], host, headers)[0]["status"])


def websocket(messages: list[dict[str, Any]], host: str = "127.0.0.1:4200", **headers: str) -> list[str]:
    """Returns the types of the messages that the application has received, or those that closed the connection."""
    scope = {"type": "websocket", "path": "/api/events/out", "subprotocols": ["prefect"]}
    return [message.get("received", message["type"]) for message in sent(scope, messages, host, headers)]


def sent(scope: dict[str, Any], messages: list[dict[str, Any]], host: str, headers: dict[str, str]) -> list[Any]:
    found: list[Any] = []
    rest = iter([{"type": "websocket.connect"}, *messages])

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "http":
            await send({"status": 200})
            return
        while (message := await receive())["type"] != "websocket.disconnect":
            await send({"type": "seen", "received": message["type"]})

    async def receive() -> Any:
        return next(rest, {"type": "websocket.disconnect"})

    async def send(message: Any) -> None:
        found.append(message)

    named = {"host": host, **{name.replace("_", "-").lower(): value for name, value in headers.items()}}
    scope["headers"] = [(name.encode(), value.encode()) for name, value in named.items()]
    asyncio.run(OwnersOnly(app, CREDENTIAL)(scope, receive, send))
    return found


@pytest.mark.parametrize("path", ["/", "/api/flows", "/api/health", "/enter/login", "/version", "/ui-settings"])
def test_a_request_without_the_credential_is_refused(path: str) -> None:
    assert request(path) == 401
    assert request(path, Authorization="Basic " + b64encode(b"zerotune:another").decode()) == 401
    assert request(path, Authorization="Bearer the-key") == 401
    assert request(path, **OWNERS) == 200


@pytest.mark.parametrize("host", ["localhost:4200", "127.0.0.1:9999", "[::1]:4200", "localhost"])
def test_this_host_has_its_own_names_at_any_port_that_a_tunnel_gives_it(host: str) -> None:
    assert request(host=host, **OWNERS) == 200
    assert request(host=host, Origin=f"http://{host}", **OWNERS) == 200


@pytest.mark.parametrize(
    "host", ["evil.example", "evil.example:4200", "127.0.0.1.evil.example:4200", "", "10.0.0.1:4200"]
)
def test_another_name_that_leads_here_is_refused(host: str) -> None:
    assert request(host=host, **OWNERS) == 403
    assert request("/enter", host=host) == 403
    assert websocket([LOGIN], host=host) == ["websocket.close"]


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "https://127.0.0.1:4200", "http://127.0.0.1:4201"])
def test_a_page_of_another_origin_is_refused_whatever_the_browser_adds(origin: str) -> None:
    assert request(method="POST", Origin=origin, **OWNERS) == 403
    assert websocket([LOGIN], Origin=origin, **OWNERS) == ["websocket.close"]


def test_a_foreign_page_may_link_here_and_embed_nothing() -> None:
    foreign = {"Sec_Fetch_Site": "cross-site", **OWNERS}
    assert request(Sec_Fetch_Dest="document", **foreign) == 200
    assert request(method="POST", Sec_Fetch_Dest="document", **foreign) == 403
    for embedded in ("image", "script", "iframe", "empty"):
        assert request(Sec_Fetch_Dest=embedded, **foreign) == 403
    assert request(Sec_Fetch_Site="same-origin", Sec_Fetch_Dest="empty", **OWNERS) == 200


def test_a_connection_of_prefect_s_clients_is_let_in_by_its_first_message() -> None:
    later = {"type": "websocket.receive", "text": "{}"}
    assert websocket([LOGIN, later]) == ["websocket.connect", "websocket.receive", "websocket.receive"]
    assert websocket([later], **OWNERS) == ["websocket.connect", "websocket.receive"]


@pytest.mark.parametrize(
    "first",
    ["{}", "no JSON", "[]", "3", "", '{"type": "auth"}', '{"type": "auth", "token": null}', '{"type": "filter"}'],
)
def test_a_connection_that_begins_otherwise_is_closed(first: str) -> None:
    assert websocket([{"type": "websocket.receive", "text": first}, LOGIN]) == ["websocket.connect", "websocket.close"]


def test_a_connection_without_a_login_s_protocol_is_closed() -> None:
    scope = {"type": "websocket", "path": "/api/events/out", "subprotocols": []}
    assert [message["type"] for message in sent(scope, [LOGIN], "127.0.0.1:4200", {})] == ["websocket.close"]


def test_the_page_behind_a_link_is_the_same_for_everybody() -> None:
    start, body = sent({"type": "http", "path": "/enter", "method": "GET"}, [], "127.0.0.1:4200", {})
    assert start["status"] == 200
    assert dict(start["headers"])[b"referrer-policy"] == b"no-referrer"
    assert b"the-key" not in body["body"]


def test_each_start_has_a_credential_of_its_own_which_a_link_has_behind_its_hash() -> None:
    one, another = drawn_credential(), drawn_credential()
    assert one != another
    password = one.partition(":")[2]
    assert "/" not in password
    assert entry_link("http://127.0.0.1:5000", one, "/#/runs") == f"http://127.0.0.1:5000/enter#{password}/#/runs"
