"""Prefect's own record of a flow run: complete before its server may go."""

import time

from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterName
from prefect.logging.handlers import APILogHandler

_PATIENCE_S = 10.0
_POLL_S = 0.2


def wait_for_history(flow_run_name: str) -> bool:
    """Waits until the server has recorded the end of every task run: their states arrive a little later than they are.

    Returns:
        Whether it has; False if it did not within ten seconds.
    """
    # What is logged after this would find the server gone.
    APILogHandler().flush()
    deadline = time.monotonic() + _PATIENCE_S
    only = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run_name]))
    seen = -1
    with get_client(sync_client=True) as client:
        while time.monotonic() < deadline:
            runs = []
            while page := client.read_task_runs(flow_run_filter=only, limit=200, offset=len(runs)):
                runs += page
            if len(runs) == seen and all(run.state is not None and run.state.is_final() for run in runs):
                return True
            seen = len(runs)
            time.sleep(_POLL_S)
    return False
