"""The door of ZeroTune's own servers: it refuses requests without the owner's credential, and those of other web pages.

Every user of this host can reach a port on loopback, and so can every web page in a browser here. The credential is a
user and a password, which Prefect's and MLflow's clients send in the header of HTTP's own login. Browsers send it by
themselves once they have it. They keep it for one port. A cookie would go to all ports of this host, and so to a server
of another user.
"""

import hashlib
import hmac
import json
import secrets
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

USER = "zerotune"
CREDENTIAL = "ZEROTUNE_CREDENTIAL"  # the variable in which a server gets it: every user can read a command line
ENTRY = "/enter"
_LOOPBACK_NAMES = (b"127.0.0.1", b"localhost", b"[::1]")
# The page gives the browser the credential that stands behind `#`, which browsers never send, and opens what follows.
_SCRIPT = f"""
const [, password, page] = location.hash.match(/^#?([^/]*)(.*)$/s);
const login = new XMLHttpRequest();
login.onloadend = () => login.status === 200
  ? location.replace(location.origin + (page || "/"))
  : document.body.append("This link is of an earlier start. Use the one that was printed last.");
if (password) {{
  login.open("GET", "{ENTRY}/login", true, "{USER}", password);
  login.send();
}} else document.body.append("This address lacks its end, which logs you in. Open the whole link that was printed.");
onhashchange = () => location.reload();
"""
_ENTRY_PAGE = f'<!doctype html><title>ZeroTune</title><meta charset="utf-8"><body><script>{_SCRIPT}</script>'
_SCRIPT_HASH = b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_ENTRY_HEADERS = {
    "Content-Type": "text/html",
    "Content-Security-Policy": f"default-src 'none'; script-src 'sha256-{_SCRIPT_HASH}'; connect-src 'self'",
    "Cache-Control": "no-store",
    "Referrer-Policy": "no-referrer",
}

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


def drawn_credential() -> str:
    """Returns a new credential: a user and a password, as Prefect's clients want it."""
    return f"{USER}:{secrets.token_urlsafe(24)}"


def entry_link(server: str, credential: str, page: str = "") -> str:
    """Returns the address that opens a page of a server, and logs the browser in.

    Args:
        server: its address, without a path.
        credential: the server's.
        page: the path of the page. Empty for the first one.
    """
    return f"{server}{ENTRY}#{credential.partition(':')[2]}{page}"


class OwnersOnly:
    """An ASGI application behind the door.

    Args:
        app: the application.
        credential: the owner's, `user:password`.
    """

    def __init__(self, app: Callable[..., Awaitable[None]], credential: str) -> None:
        self._app = app
        self._credential = credential
        self._header = b"Basic " + b64encode(credential.encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Passes a request of the owner on, and refuses any other."""
        if scope["type"] == "lifespan":
            return await self._app(scope, receive, send)
        headers = dict(scope["headers"])
        is_owners = hmac.compare_digest(headers.get(b"authorization", b""), self._header)
        if not _is_from_here(scope, headers):
            return await _refuse(scope, send, 403, "This request is of another web page or for another host.")
        if scope["type"] == "websocket" and not is_owners:
            # Some of Prefect's clients log in with their first message instead of the header.
            if "prefect" not in scope["subprotocols"]:
                return await _refuse(scope, send, 403, "")
            return await self._app(scope, self._logged_in(receive, send), send)
        if scope["path"] == ENTRY:
            return await _answer(send, 200, _ENTRY_PAGE, _ENTRY_HEADERS)
        if not is_owners:
            said = "Only the owner of this server may use it. `zerotune up` prints links that log a browser in."
            return await _refuse(scope, send, 401, said)
        if scope["path"] == f"{ENTRY}/login":
            return await _answer(send, 200, "", {})
        return await self._app(scope, receive, send)

    def _logged_in(self, receive: Receive, send: Send) -> Receive:
        # A `receive` that closes the connection unless its first message is the owner's login.
        is_in = False

        async def receive_after_login() -> Message:
            nonlocal is_in
            message = await receive()
            if message["type"] != "websocket.receive" or is_in:
                return message
            is_in = self._is_login(message.get("text") or "")
            if is_in:
                return message
            await send({"type": "websocket.close", "code": 1008})
            return {"type": "websocket.disconnect", "code": 1008}

        return receive_after_login

    def _is_login(self, text: str) -> bool:
        try:
            login = json.loads(text)
            return login["type"] == "auth" and hmac.compare_digest(login["token"].encode(), self._credential.encode())
        except (ValueError, TypeError, KeyError, AttributeError):
            return False


def _is_from_here(scope: Message, headers: MutableMapping[bytes, bytes]) -> bool:
    """Returns whether a request is for this host by a name of its own, and of no page but this server's.

    A foreign page can reach this server under its own name, if that name leads to loopback. It cannot hide its name.
    """
    host = headers.get(b"host", b"")
    name, _, port = host.rpartition(b":")
    if (name if port.isdigit() else host) not in _LOOPBACK_NAMES:
        return False
    if headers.get(b"origin", b"http://" + host) != b"http://" + host:
        return False
    # A link on a foreign page may lead here. The page cannot read what it leads to.
    is_link = scope.get("method") == "GET" and headers.get(b"sec-fetch-dest") == b"document"
    return is_link or headers.get(b"sec-fetch-site", b"none") in (b"none", b"same-origin")


async def _refuse(scope: Message, send: Send, status: int, said: str) -> None:
    if scope["type"] == "websocket":
        return await send({"type": "websocket.close", "code": 1008})
    headers = {"WWW-Authenticate": 'Basic realm="ZeroTune"'} if status == 401 else {}
    return await _answer(send, status, json.dumps({"detail": said}), {"Content-Type": "application/json", **headers})


async def _answer(send: Send, status: int, text: str, headers: MutableMapping[str, str]) -> None:
    shown = [(name.lower().encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": shown})
    await send({"type": "http.response.body", "body": text.encode()})
