"""`zerotune doctor`: it checks for common problems and prints a remedy for each. It changes nothing."""

import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import click

from flows.servers.prefect_check import check_prefect
from flows.terminal import print_document
from trial_lib.device.host.this_host import kind_of
from trial_lib.doctor.builds import (
    check_compiler,
    check_environment,
    check_locks,
    check_ops,
    devices,
    environment_report,
    tried_devices,
)
from trial_lib.doctor.check import Check, Verdict
from trial_lib.doctor.devices import DevicesFound, check_accelerators, check_devices
from trial_lib.doctor.host import (
    BUILDS,
    DATA,
    LOCKS,
    STUDIES,
    check_clock,
    check_layers,
    check_shared_memory,
    check_write_access,
)
from trial_lib.doctor.mlflow import check_mlflow
from trial_lib.launch.cold import rank_environment
from trial_lib.records.study_folder import STUDIES as STUDIES_FOLDER
from trial_lib.secrets.by_value import known_here
from trial_lib.slots.lock_dir import host_lock_dir
from trial_lib.study.kept.data_folder import data_folder
from trial_lib.study.opening.build_folder import build_root, with_build_folder
from trial_lib.wire.errors import InputError
from trial_lib.wire.plain_text import plain

# The operators that `flows.prepare` builds, by DeepSpeed's names.
_COMMON_OPS = {"cpu": ("deepspeed_shm_comm", "fused_adam", "cpu_adam"), "cuda": ("fused_adam", "cpu_adam")}
_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def doctor_command(as_json: bool) -> int:
    """Prints all checks.

    Args:
        as_json: whether to print one JSON document.

    Returns:
        The exit code, which is 1 if a check fails.
    """
    began = time.monotonic()
    checks = examine(Path.cwd())
    failed = any(check.verdict is Verdict.FAIL for check in checks)
    if as_json:
        document = {
            "healthy": not failed,
            "seconds": round(time.monotonic() - began, 1),
            "checks": [{**vars(check), "verdict": check.verdict.value} for check in checks],
        }
        print_document(document)
    else:
        for check in checks:
            _tell(check)
    return int(failed)


def examine(work_dir: Path) -> list[Check]:
    """Returns the checks of this host, of the servers, and of the folders that a study in `work_dir` would write to."""
    environment = with_build_folder(rank_environment(), sys.executable)
    with ThreadPoolExecutor() as pool:
        # These take seconds each, so they run at the same time.
        asked = pool.submit(environment_report, sys.executable, environment)
        there = pool.submit(devices)
        prefect = pool.submit(check_prefect)
        mlflow = pool.submit(check_mlflow, work_dir)
        found, device = _devices_found(there)
        # After the check for other processes on the devices, which would find this one.
        tries = device is not None and not kind_of(device).computes_on_the_processor
        trying = pool.submit(tried_devices, sys.executable, environment) if tries else None
        report = asked.result()
        tried = None if trying is None else trying.result()
        prefect_check, server_time, asked_at = prefect.result()
        mlflow_check = mlflow.result()
    # Only a GPU's driver can fail to answer. The first check reports it.
    device = device or "cuda"
    folders = {
        STUDIES: work_dir / STUDIES_FOLDER,
        DATA: data_folder(),
        BUILDS: build_root(environment),
        LOCKS: host_lock_dir(),
    }
    return [
        check_accelerators(found, report, tried),
        *check_devices(found),
        check_environment(sys.executable, report),
        check_ops(report, _COMMON_OPS[device]),
        check_locks(environment),
        check_compiler(environment, device, report),
        check_shared_memory(),
        check_layers(work_dir),
        *check_write_access(folders),
        prefect_check,
        mlflow_check,
        check_clock(server_time, asked_at),
    ]


def _devices_found(there: Future[DevicesFound]) -> tuple[DevicesFound | InputError, str | None]:
    """Returns the devices and their kind. Returns the driver's error and None if the driver does not answer."""
    try:
        found = there.result()
    except InputError as error:
        return error, None
    return found, found.host.device


def _tell(check: Check) -> None:
    """Prints a check. A rich table would break a remedy into lines, and a broken command cannot be copied."""
    mark = click.style(f"{check.verdict.value:5}", fg=_COLOURS[check.verdict], bold=check.verdict is not Verdict.OK)
    click.echo(f"{mark}{check.name:15}{_shown(check.said)}")
    if check.remedy:
        click.echo(f"{'':5}{'':15}-> {_shown(check.remedy)}")


def _shown(text: str) -> str:
    """Returns a text without secrets, because people pass on what the doctor said."""
    return known_here().hide(plain(text))
