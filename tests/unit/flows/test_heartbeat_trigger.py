"""Which runs the automation watches: those of ZeroTune's deployments, whose heartbeats come every 30 s."""

from datetime import datetime, timezone
from pathlib import Path
from uuid import uuid4

import pytest
import yaml
from prefect.events import RelatedResource, Resource
from prefect.server.events.schemas.automations import EventTrigger
from prefect.server.events.schemas.events import ReceivedEvent

DEPLOYMENTS = Path(__file__).parents[3] / "deployments"


@pytest.mark.parametrize(
    ("tags", "watched"), [(["zerotune"], True), (["mine", "zerotune"], True), (["mine"], False), ([], False)]
)
def test_the_runs_of_the_deployments_are_watched_and_no_others(tags: list[str], watched: bool) -> None:
    (automation,) = yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]
    trigger = EventTrigger.model_validate(automation["trigger"])
    event = ReceivedEvent(
        occurred=datetime.now(timezone.utc),
        event="prefect.flow-run.heartbeat",
        resource=Resource({"prefect.resource.id": f"prefect.flow-run.{uuid4()}"}).root,
        related=[
            RelatedResource({"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}).root
            for tag in tags
        ],
        payload={},
        id=uuid4(),
    )
    assert trigger.covers(event) is watched


def test_every_deployment_has_the_tag() -> None:
    deployments = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["deployments"]
    assert all("zerotune" in deployment["tags"] for deployment in deployments)
