"""A server of ZeroTune's own, as a process, for its owner alone: `python own_server.py prefect ...`.

`python -m uvicorn` would search the user's folder for modules first. A file there may have the name of a module of
Prefect's.
"""

import argparse
import gc
import hashlib
import hmac
import json
import os
import secrets
import socket
import sys
from base64 import b64encode
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any


def main(kind: str, port: int, listener: int) -> None:
    """Serves until it is killed. The garbage collector is off during the imports, which saves a fifth of their time."""
    credential = os.environ.pop(CREDENTIAL)
    gc.disable()
    import uvicorn

    if kind == "prefect":
        from prefect.server.api.server import create_app

    app = OwnersOnly(create_app() if kind == "prefect" else _mlflow(), credential)
    gc.freeze()
    gc.enable()
    # Another loop might not call the socket's own `listen`.
    config = uvicorn.Config(app, LOOPBACK, port, loop="asyncio", timeout_keep_alive=5, log_level="warning")
    uvicorn.Server(config).run([HandedSocket(fileno=listener)])


def _mlflow() -> Any:
    # MLflow's application over the store of `MLFLOW_BACKEND_STORE_URI`, as `mlflow server` makes it.
    from mlflow.server.constants import ARTIFACT_ROOT_ENV_VAR, BACKEND_STORE_URI_ENV_VAR

    store, artifacts = os.environ["MLFLOW_BACKEND_STORE_URI"], os.environ["MLFLOW_DEFAULT_ARTIFACT_ROOT"]
    os.environ.update({BACKEND_STORE_URI_ENV_VAR: store, ARTIFACT_ROOT_ENV_VAR: artifacts})
    from mlflow.server.handlers import initialize_backend_stores

    initialize_backend_stores(store, store, artifacts)
    from mlflow.server.fastapi_app import app

    return app


class HandedSocket(socket.socket):
    """The socket of a held port, in the server that has been handed its descriptor."""

    def listen(self, *backlog: int) -> None:
        """Listens, although connections of an earlier server may linger."""
        # Not sooner. While this is set and the socket does not listen, others can bind the port, and listen there.
        self.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        super().listen(*backlog)


# The door of ZeroTune's own servers: it refuses requests without the owner's credential, and those of other web pages.
#
# Every user of this host can reach a port on loopback, and so can every web page in a browser here. The credential is
# a user and a password, which Prefect's and MLflow's clients send in the header of HTTP's own login. Browsers send it
# by themselves once they have it. They keep it for one port. A cookie would go to all ports of this host, and so to a
# server of another user.

LOOPBACK = "127.0.0.1"
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
    """Returns the address that opens a page of a server, and logs the browser in."""
    return f"{server}{ENTRY}#{credential.partition(':')[2]}{page}"


class OwnersOnly:
    """An ASGI application behind the door."""

    def __init__(self, app: Callable[..., Awaitable[None]], credential: str) -> None:
        self._app = app
        self._credential = credential
        self._header = b"Basic " + b64encode(credential.encode())

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
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


if __name__ == "__main__":
    # Python put this folder first on the path, unless it runs with -P. Its modules must only be found as
    # `zerotune.flows.*`.
    if not getattr(sys.flags, "safe_path", False):
        sys.path.pop(0)
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("kind", choices=["prefect", "mlflow"])
    parser.add_argument("--port", required=True, type=int)
    parser.add_argument("--listener", required=True, type=int)
    main(**vars(parser.parse_args()))
