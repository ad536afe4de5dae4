import threading
from types import SimpleNamespace
from typing import Any

import cloudpickle

from flows.running_study import RunningStudy
from flows.tune import tune_open


def test_a_command_s_flow_can_be_sent_to_another_host_without_its_study() -> None:
    """Prefect does so with each task on Ray. A study has locks, threads and open files."""
    study: Any = SimpleNamespace(lock=threading.Lock())
    flow = cloudpickle.loads(cloudpickle.dumps(tune_open(RunningStudy(study))))
    assert flow.name == "tune"
