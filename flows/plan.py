"""The flow `plan` of deployments."""

import logging
from pathlib import Path
from typing import Any

from prefect import flow, get_run_logger
from prefect.states import Cancelled, Completed, Failed, State

from zerotune.flows.interrupts import interrupts
from zerotune.flows.options import checked, shows, work_folder
from zerotune.flows.planning import plan_to_end
from zerotune.tasks.cancellation import hear_cancellation, is_interrupt, outlive_worker
from zerotune.tasks.results import report_plan
from zerotune.tasks.telling import keep_secrets_from_prefect, name_run
from zerotune.trial_lib.messages.errors import ProgramNotForeseenError
from zerotune.trial_lib.plan.plan_record import PlanArguments


@flow(name="plan", persist_result=False, validate_parameters=True)
@shows(PlanArguments, derived=("zero_stages",))
def plan(work_dir: Path | None = None, **arguments: Any) -> State[Any]:
    """Foresees which configurations fit on devices that are not here, and how fast they train.

    Args:
        work_dir: the folder for the plan, and for its MLflow store if no other store is named.
        **arguments: the fields of `PlanArguments`.
    """
    outlive_worker()
    keep_secrets_from_prefect()
    folder, log = work_folder(work_dir), get_run_logger()

    def check() -> None:
        interrupts.check()
        hear_cancellation(log.warning)

    try:
        end = plan_to_end(checked(PlanArguments, arguments), folder, log.info, check)
    except ProgramNotForeseenError as error:
        return Failed(message=str(error))
    except BaseException as error:
        if interrupts.heard or is_interrupt(error):
            return Cancelled(message=interrupts.ended() or "Interrupted. Nothing of it is left.")
        raise
    name_run(end.record.plan_id, logging.getLogger(__name__))
    report_plan(end.record, end.paths, end.tracker)
    return Completed(message=str(end.paths.root))
