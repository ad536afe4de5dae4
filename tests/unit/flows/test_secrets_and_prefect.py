"""What a Prefect server is told goes without secrets, whoever in this process tells it."""

import asyncio
import json
from typing import Any

import pytest
from prefect.client.base import PrefectHttpxAsyncClient, PrefectHttpxSyncClient
from prefect.events import Event
from prefect.events.clients import AssertingEventsClient

from zerotune.tasks.telling import hidden, keep_secrets_from_prefect
from zerotune.trial_lib.inputs.known_secrets import KnownSecrets, keep_secret

SECRET = "hunter-two-22"


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerotune.trial_lib.inputs.known_secrets._OfProcess.secrets", None)
    keep_secrets_from_prefect()
    keep_secret(KnownSecrets.within({"token": SECRET}))


@pytest.mark.parametrize("client", [PrefectHttpxAsyncClient, PrefectHttpxSyncClient])
def test_no_request_holds_one(client: Any) -> None:
    keep_secrets_from_prefect()
    state = {"type": "FAILED", "message": f"ValueError: {SECRET}", "state_details": {"flow_run_id": SECRET}}
    request = client(base_url="http://server").build_request(
        "POST", "/flow_runs/", json={"state": state, "tags": [SECRET]}
    )
    shown = json.loads(request.content)
    assert shown["tags"] == ["<redacted>"]
    assert shown["state"]["message"] == "ValueError: <redacted>"
    # Not Prefect's own words.
    assert shown["state"]["state_details"] == {"flow_run_id": SECRET}
    assert client(base_url="http://server").build_request("GET", "/hello").content == b""


def test_no_event_holds_one() -> None:
    async def emit() -> Event:
        async with AssertingEventsClient() as client:
            resource = {"prefect.resource.id": "prefect.task-run.1", "prefect.resource.name": SECRET}
            await client.emit(Event(event="ended", resource=resource, payload={"message": f"said {SECRET}"}))
        (event,) = client.events
        return event

    event = asyncio.run(emit())
    assert event.payload == {"message": "said <redacted>"}
    assert event.resource["prefect.resource.name"] == "<redacted>"


def test_a_table_stays_a_table_and_parameters_lose_what_their_names_give_away() -> None:
    secrets = KnownSecrets.within({"token": SECRET})
    rows = [{"note": "with --api_key abc", "value": SECRET}]
    shown = hidden({"data": json.dumps(rows), "parameters": {"settings": {"api_key": "abc"}}}, secrets)
    assert json.loads(shown["data"]) == [{"note": "with --api_key <redacted>", "value": "<redacted>"}]
    assert shown["parameters"] == {"settings": {"api_key": "<redacted>"}}
