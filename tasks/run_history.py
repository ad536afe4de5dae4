"""Prefect's own record of a flow run: complete before its server may go."""

import time
from uuid import UUID

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId

_PATIENCE_S = 10.0
_POLL_S = 0.2


def wait_for_history(flow_run_id: UUID) -> bool:
    """Waits until the server has recorded the end of every task run: their states arrive a little later than they are.

    Returns:
        Whether it has; False if it did not within ten seconds.
    """
    deadline = time.monotonic() + _PATIENCE_S
    only = FlowRunFilter(id=FlowRunFilterId(any_=[flow_run_id]))
    seen = -1
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = []
            while page := client.read_task_runs(flow_run_filter=only, limit=200, offset=len(runs)):
                runs += page
            if runs and len(runs) == seen and all(run.state is not None and run.state.is_final() for run in runs):
                return True
            seen = len(runs)
            time.sleep(_POLL_S)
    return False
