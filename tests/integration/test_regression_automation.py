"""The automation that the documents show: a real Prefect server takes it, and it acts on a regression."""

import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml
from full_experiment_fixtures import prefect_server_of
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.events import Event, emit_event
from prefect.events.schemas.automations import AutomationCore
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from zerotune.tasks.results import REGRESSION

if TYPE_CHECKING:
    from uuid import UUID

DOCUMENT = Path(__file__).parents[2] / "docs" / "scheduled_tuning.md"


def documented() -> dict[str, Any]:
    """The automation that the document has whole."""
    blocks = re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    (automation,) = yaml.safe_load(blocks[0])["automations"]
    found: dict[str, Any] = automation
    return found


def test_the_documented_automation_is_one_and_waits_for_the_event_that_is_sent() -> None:
    automation = AutomationCore.model_validate(documented())
    assert automation.trigger.expect == {REGRESSION}  # type: ignore[union-attr]
    notification = yaml.safe_load(re.findall(r"```yaml\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)[1])
    AutomationCore.model_validate({**documented(), **notification})


def regression(deployment: "UUID") -> Event | None:
    """The event as a run of a deployment sends it: Prefect adds what the run belongs to."""
    return emit_event(
        REGRESSION,
        resource={"prefect.resource.id": "zerotune.experiment.team", "prefect.resource.name": "team"},
        related=[{"prefect.resource.id": f"prefect.deployment.{deployment}", "prefect.resource.role": "deployment"}],
        payload={"sentence": "half as fast"},
    )


def is_paused(client: SyncPrefectClient, deployment: "UUID", within_s: float) -> bool:
    deadline = time.monotonic() + within_s
    while not client.read_deployment(deployment).paused:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.2)
    return True


@pytest.mark.alone
@pytest.mark.long
def test_it_pauses_the_deployment_whose_run_has_regressed(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One that is there for more than a command.
    monkeypatch.setattr("zerotune.flows.prefect_server._IDLE_SERVICES", ())
    with (
        prefect_server_of(home) as server,
        temporary_settings({PREFECT_API_URL: server.api_url}),
        get_client(sync_client=True) as client,
    ):
        flow = client.create_flow_from_name("tune")
        regressed, another = (client.create_deployment(flow, name=name) for name in ("regressed", "another"))
        automation = client.create_automation(AutomationCore.model_validate(documented()))
        try:
            # A server learns of a new automation a little later than it says that it has it.
            time.sleep(2)
            assert regression(regressed) is not None
            EventsWorker.instance().wait_until_empty()
            assert is_paused(client, regressed, within_s=30)
            assert not client.read_deployment(another).paused
        finally:
            client.delete_automation(automation)
