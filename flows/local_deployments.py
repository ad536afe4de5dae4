"""What `zerotune up` sets up on its Prefect server: the work pool, the deployments, the states of lost runs.

It imports Prefect, which reads its settings then. So the server's variables have to be set before.
"""

import json
import os
import shlex
import sys
import time
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.actions import DeploymentUpdate, WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import (
    FlowRunFilter,
    FlowRunFilterParentFlowRunId,
    FlowRunFilterState,
    FlowRunFilterStateType,
    WorkPoolFilter,
    WorkPoolFilterName,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.client.schemas.responses import DeploymentResponse
from prefect.events.schemas.automations import AutomationCore
from prefect.exceptions import ObjectNotFound
from prefect.states import Cancelling, Crashed

from zerotune.flows.interrupts import interrupts
from zerotune.flows.prefect_server import ServerError, own_home, run_to_end, up_folder
from zerotune.flows.up import POOL

DEPLOYMENTS = Path(__file__).parents[1] / "deployments"
TUNE = "zerotune.flows.tune.tune"
_LOCAL, _NIGHTLY = "local", "nightly"  # deployments of the flow tune; each other flow has a local one too
_TAG = "zerotune"  # the automation watches the runs of deployments with this tag
_CANCEL_S = 35.0  # a full experiment may use 20 s of them to save a checkpoint
_WORKER_S = 120.0
_POLL_S = 0.2
_IN_POOL = WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL]))
_BEGUN = (StateType.PENDING, StateType.RUNNING, StateType.CANCELLING)
_IN_BEGUN = FlowRunFilterState(type=FlowRunFilterStateType(any_=list(_BEGUN)))


def apply_deployments(work_dir: Path) -> None:
    """Creates or updates the work pool, its deployments and the automation that detects killed runs.

    Edits by people are kept: the nightly deployment's schedule and parameters, and the pool's limit, pause and
    description. Raises ServerError: Prefect refused the deployments.
    """
    with get_client(sync_client=True) as client:
        template = json.loads((DEPLOYMENTS / "work_pools" / "process.json").read_text())
        # With this command a run starts in this interpreter at once. Else Prefect starts another one first.
        command = shlex.join([sys.executable, "-m", "prefect.engine"])
        template["variables"]["properties"]["command"]["default"] = command
        _put_pool(client, template)
        nightly = _find(client, f"tune/{_NIGHTLY}")
        _deploy([_LOCAL] if nightly else [_LOCAL, _NIGHTLY], work_dir)
        if nightly is not None:
            schema = client.read_deployment_by_name(f"tune/{_LOCAL}").parameter_openapi_schema
            update = DeploymentUpdate(
                entrypoint=TUNE,
                parameter_openapi_schema=schema,
                parameters={**nightly.parameters, "work_dir": str(work_dir)},
                tags=sorted({*nightly.tags, _TAG}),
            )
            client.update_deployment(nightly.id, update)
        for described in yaml.safe_load((DEPLOYMENTS / "automations.yaml").read_text())["automations"]:
            _put(client, AutomationCore.model_validate(described))


def _put_pool(client: SyncPrefectClient, template: dict[str, Any]) -> None:
    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        client.create_work_pool(WorkPoolCreate(name=POOL, type="process", base_job_template=template))
    else:
        client.update_work_pool(POOL, WorkPoolUpdate(base_job_template=template))


def _put(client: SyncPrefectClient, automation: AutomationCore) -> None:
    known = client.read_automations_by_name(automation.name)
    if known:
        # People may have switched it off.
        automation = automation.model_copy(update={"enabled": known[0].enabled})
        client.update_automation(known[0].id, automation)
    else:
        client.create_automation(automation)


def _find(client: SyncPrefectClient, name: str) -> DeploymentResponse | None:
    try:
        return client.read_deployment_by_name(name)
    except ObjectNotFound:
        return None


def _deploy(names: list[str], work_dir: Path) -> None:
    named = [word for name in names for word in ("--name", name)]
    command = [
        *(sys.executable, "-m", "prefect", "--no-prompt", "deploy"),
        *("--prefect-file", str(DEPLOYMENTS / "prefect.yaml"), *named),
    ]
    environment = {**os.environ, "PWD": str(work_dir)}
    exit_code, said = run_to_end(command, environment, folder=own_home(), log=up_folder() / "deploy.log")
    if exit_code != 0:
        raise ServerError(f"Prefect refused the deployments in {DEPLOYMENTS}: {said}")


def name_lost_runs() -> int:
    """Sets runs whose worker has died to Crashed. Returns how many there were."""
    with get_client(sync_client=True) as client:
        lost = _begun(client)
        for run in [*lost, *_begun_within(client, lost)]:
            message = "Its worker was killed. `zerotune resume` resumes its study."
            client.set_flow_run_state(run.id, Crashed(message=message), force=True)
    return len(lost)


def cancel_runs() -> int:
    """Cancels all runs, and waits up to `_CANCEL_S` for their end. Returns how many there were."""
    with get_client(sync_client=True) as client:
        begun = _begun(client)
        for run in begun:
            client.set_flow_run_state(run.id, Cancelling())
        deadline = time.monotonic() + _CANCEL_S
        while _begun(client) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
    return len(begun)


def _begun(client: SyncPrefectClient) -> list[FlowRun]:
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(state=_IN_BEGUN), work_pool_filter=_IN_POOL)


def _begun_within(client: SyncPrefectClient, runs: list[FlowRun]) -> list[FlowRun]:
    # The full experiments that these runs have begun. Those are in no work pool.
    if not runs:
        return []
    parents = FlowRunFilterParentFlowRunId(any_=[run.id for run in runs])
    return client.read_flow_runs(flow_run_filter=FlowRunFilter(state=_IN_BEGUN, parent_flow_run_id=parents))


def wait_for_worker(since: datetime) -> None:
    """Waits for the first heartbeat of a worker since its start: earlier ones are another worker's.
    Raises ServerError: no heartbeat came within `_WORKER_S`.
    """
    deadline = time.monotonic() + _WORKER_S
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            interrupts.check()
            heard = [worker.last_heartbeat_time for worker in client.read_workers_for_work_pool(POOL)]
            if any(moment is not None and moment >= since for moment in heard):
                return
            time.sleep(_POLL_S)
    raise ServerError("The worker did not start.")
