"""Which runs the automation watches, and until when: those of the deployments, whose heartbeats come every 30 s."""

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
    assert heartbeat_trigger().covers(of_a_run("heartbeat", tags)) is watched


@pytest.mark.parametrize(
    ("word", "closes"),
    [
        *((state, True) for state in ("Completed", "Failed", "Cancelled", "Crashed", "AwaitingRetry", "Scheduled")),
        *((state, False) for state in ("Pending", "Running", "Cancelling")),
    ],
)
def test_what_has_ended_or_waits_to_begin_again_has_no_heartbeats_to_miss(word: str, closes: bool) -> None:
    trigger = heartbeat_trigger()
    event = of_a_run(word, ["zerotune"])
    assert trigger.expects(event.event) is closes
    assert not trigger.starts_after(event.event)


def heartbeat_trigger() -> EventTrigger:
    (automation,) = yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]
    return EventTrigger.model_validate(automation["trigger"])


def of_a_run(word: str, tags: list[str]) -> ReceivedEvent:
    """An event of a run with these tags, as the server receives it."""
    return ReceivedEvent(
        occurred=datetime.now(timezone.utc),
        event=f"prefect.flow-run.{word}",
        resource=Resource({"prefect.resource.id": f"prefect.flow-run.{uuid4()}"}).root,
        related=[
            RelatedResource({"prefect.resource.id": f"prefect.tag.{tag}", "prefect.resource.role": "tag"}).root
            for tag in tags
        ],
        payload={},
        id=uuid4(),
    )


def test_every_deployment_has_the_tag() -> None:
    deployments = yaml.safe_load((DEPLOYMENTS / "prefect.yaml").read_text())["deployments"]
    assert all("zerotune" in deployment["tags"] for deployment in deployments)
