"""Seconds from the creation of a deployed run to its Running state, under `zerotune up`.

python benchmarks/operations/deployment_latency.py [--runs 5] [--output RESULT.json]

The runs are those of `tune/local` as `prefect deployment run` creates them. What they are given is refused by the
flow's first line: nothing of a study is in the figure, and nothing runs beside the next one.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from zerotune.flows.prefect_server import log_in

PREFECT_PORT, MLFLOW_PORT = 42_871, 42_872
API_URL = f"http://127.0.0.1:{PREFECT_PORT}/api"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    os.environ["PREFECT_API_URL"] = API_URL
    with tempfile.TemporaryDirectory() as folder:
        began = time.monotonic()
        up = subprocess.Popen(
            [
                *(Path(sys.executable).with_name("zerotune"), "up"),
                *("--prefect-port", str(PREFECT_PORT), "--mlflow-port", str(MLFLOW_PORT)),
            ],
            cwd=folder,
            stderr=subprocess.PIPE,
            text=True,
        )
        try:
            wait_until_up(up)
            ready_s = time.monotonic() - began
            log_in()
            seconds = [seconds_to_running() for _ in range(options.runs)]
        finally:
            up.send_signal(signal.SIGINT)
            up.wait()
    measured = {
        "up_ready_s": round(ready_s, 1),
        "creation_to_running_s": [round(value, 2) for value in seconds],
        "median_s": round(statistics.median(seconds), 2),
        "largest_s": round(max(seconds), 2),
        "cpus": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 1),
    }
    print(json.dumps(measured, indent=2))
    if options.output:
        options.output.write_text(json.dumps(measured, indent=2) + "\n")


def wait_until_up(up: "subprocess.Popen[str]") -> None:
    assert up.stderr is not None
    for line in up.stderr:
        sys.stderr.write(line)
        if line.startswith("Stop everything"):
            return
    raise SystemExit("zerotune up has ended")


def seconds_to_running() -> float:
    """Creates a run, waits for its end, and returns the seconds between its creation and its Running state."""
    from prefect.client.orchestration import get_client

    with get_client(sync_client=True) as client:
        deployment = client.read_deployment_by_name("tune/local")
        parameters: dict[str, Any] = {"config_path": "relative.yaml"}
        run = client.create_flow_run_from_deployment(deployment.id, parameters=parameters)
        assert run.created is not None
        while not run.state or not run.state.is_final():
            time.sleep(0.2)
            run = client.read_flow_run(run.id)
        running = [state for state in client.read_flow_run_states(run.id) if state.is_running()]
    return (running[0].timestamp - run.created).total_seconds()


if __name__ == "__main__":
    main()
