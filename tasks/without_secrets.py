"""Removal of known secrets from all requests of this process to a Prefect server.

Prefect sends much by itself: parameters, logs, events, and exceptions as messages of states. So the filter sits in the
clients of its API and of its events, which all of it passes through.
"""

import json
from pathlib import Path
from typing import Any

from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.events import Event
from prefect.events.clients import EventsClient

from trial_lib.secrets.by_value import KnownSecrets, known_here
from trial_lib.secrets.sent_command import sent_document, sent_text

# Prefect's own values: ids, and words of its protocol.
_PROTOCOL = frozenset({"id", "key", "type", "sort", "event", "occurred", "timestamp", "kind", "operator"})
_ENDINGS = ("_id", "_key", "_type", ".id", "_time", "_version")
# People choose the names below these keys, so a name may show that its value is a secret.
_NAMED_BY_PEOPLE = ("parameters", "job_variables")


def keep_secrets_from_prefect() -> None:
    """Has Prefect's clients hide the secrets that this process knows when it sends a request."""
    for client in (PrefectHttpxAsyncClient, PrefectHttpxSyncClient):
        if "build_request" not in vars(client):
            client.build_request = _build_request(client.build_request)  # type: ignore[method-assign]
    if EventsClient.emit is not _emit:
        EventsClient.emit = _emit  # type: ignore[method-assign]


def _build_request(build: Any) -> Any:
    def build_request(client: Any, *arguments: Any, json: Any = None, **options: Any) -> Any:
        return build(client, *arguments, json=hidden(json, known_here()), **options)

    return build_request


_emit_as_it_is = EventsClient.emit


async def _emit(client: EventsClient, event: Event) -> None:
    shown = hidden(event.model_dump(mode="json"), known_here())
    await _emit_as_it_is(client, Event.model_validate(shown))


def hidden(value: Any, secrets: KnownSecrets, name: str = "") -> Any:
    """Returns a JSON value of a request to Prefect without its secrets.

    Args:
        value: the JSON value.
        secrets: the known secrets.
        name: the value's key in the enclosing object.
    """
    if isinstance(value, dict):
        if name in _NAMED_BY_PEOPLE:
            return secrets.hide_in(sent_document(value, Path(str(value.get("model_dir") or "."))))
        return {inner_name: hidden(inner, secrets, inner_name) for inner_name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [hidden(inner, secrets, name) for inner in value]
    if not isinstance(value, str) or name in _PROTOCOL or name.endswith(_ENDINGS):
        return value
    if value.startswith(("[", "{")):
        # The rows of a table are JSON as text.
        try:
            return json.dumps(secrets.hide_in(json.loads(value)))
        except ValueError:
            pass
    return secrets.hide(sent_text(value))
