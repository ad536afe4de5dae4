"""Prefect's own record of a flow run. It must be complete before the command stops its server."""

import contextlib
import time

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.filters import FlowRunFilter, FlowRunFilterId, FlowRunFilterName
from prefect.client.schemas.sorting import FlowRunSort
from prefect.logging.handlers import APILogHandler

from tasks.telling import impatient, impatient_if_away

_PATIENCE_S = 10.0
_POLL_S = 0.2
_PAGE = 200  # Prefect's most task runs in one answer


def wait_for_history(flow_run_name: str) -> bool:
    """Waits until the server has recorded the end of every task run. Their states arrive a little late.

    Only the newest run of that name counts. An earlier one may have been killed, and its task runs never end.

    Returns:
        Whether the record is complete. It is False if the server does not answer or needs longer than `_PATIENCE_S`.
    """
    with contextlib.suppress(httpx.HTTPError), impatient(retries=1), impatient_if_away():
        return _wait_for_history(flow_run_name)
    return False


def _wait_for_history(flow_run_name: str) -> bool:
    # Later lines would not reach the server.
    APILogHandler().flush()
    deadline = time.monotonic() + _PATIENCE_S
    named = FlowRunFilter(name=FlowRunFilterName(any_=[flow_run_name]))
    seen = -1
    with get_client(sync_client=True) as client:
        newest = client.read_flow_runs(flow_run_filter=named, sort=FlowRunSort.START_TIME_DESC, limit=1)
        if not newest:
            return True
        only = FlowRunFilter(id=FlowRunFilterId(any_=[run.id for run in newest]))
        while time.monotonic() < deadline:
            runs = []
            while len(runs) % _PAGE == 0:
                page = client.read_task_runs(flow_run_filter=only, limit=_PAGE, offset=len(runs))
                runs += page
                if not page:
                    break
            if len(runs) == seen and all(run.state is not None and run.state.is_final() for run in runs):
                return True
            seen = len(runs)
            time.sleep(_POLL_S)
    return False
