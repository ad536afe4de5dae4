"""`zerotune doctor`: it checks for common problems and prints a remedy for each. It changes nothing."""

import contextlib
import time
import urllib.error
import urllib.request
from concurrent.futures import Future, ThreadPoolExecutor
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import click

from zerotune.flows.prefect_server import is_configured
from zerotune.flows.terminal import print_document
from zerotune.trial_lib.device.this_host import kind_of
from zerotune.trial_lib.doctor import (
    BUILDS,
    DATA,
    HOST_LOCKS,
    STUDIES,
    Check,
    DevicesFound,
    Verdict,
    check_accelerators,
    check_clock,
    check_compiler,
    check_devices,
    check_environment,
    check_layers,
    check_locks,
    check_mlflow,
    check_ops,
    check_shared_memory,
    check_write_access,
    devices,
    environment_report,
    fail,
    ok,
    tried_devices,
    trusting,
    warn,
)
from zerotune.trial_lib.inputs.entrypoint import default_interpreter
from zerotune.trial_lib.inputs.known_secrets import known_here
from zerotune.trial_lib.launch.locks import host_lock_dir
from zerotune.trial_lib.launch.starters import rank_environment
from zerotune.trial_lib.messages.errors import InputError, plain
from zerotune.trial_lib.rank.patching import REPLACED
from zerotune.trial_lib.records.folders import STUDIES as STUDIES_FOLDER
from zerotune.trial_lib.study.folder import data_folder
from zerotune.trial_lib.study.program import build_root, with_build_folder

NAME = "Prefect"
_TIMEOUT_S = 5
_LOGIN = "Set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud."


def check_prefect() -> tuple[Check, float | None, float]:
    """Also returns the server's clock, None if it does not answer, and this host's then, in seconds since the epoch."""
    ours = version("prefect")
    if not is_configured():
        said = f"no server is configured, so a command starts its own on loopback (Prefect {ours})"
        return ok(NAME, said), None, 0.0
    from prefect.client.base import ServerType
    from prefect.client.orchestration import get_client

    remedy = "Start it, or unset PREFECT_API_URL (and your profile's) to have ZeroTune start one."
    try:
        with get_client(sync_client=True) as client:
            url = str(client.api_url).rstrip("/")
            server_time, asked_at = _clock_of(url)
            if server_time is None:
                return fail(NAME, f"{url} does not answer", remedy), None, asked_at
            error = client.api_healthcheck()
            if error is not None:
                return fail(NAME, f"{url} refuses this user ({error})", _LOGIN), server_time, asked_at
            if client.server_type is ServerType.CLOUD:
                return ok(NAME, f"{url} answers, Prefect {ours} here"), server_time, asked_at
            theirs = client.api_version()
    except Exception as error:  # noqa: BLE001 - any fault of a profile or a server is a finding
        return fail(NAME, f"the server cannot be reached ({type(error).__name__}: {error})", remedy), None, 0.0
    return _compared(url, theirs, ours), server_time, asked_at


def _compared(url: str, theirs: str, ours: str) -> Check:
    there, here = (tuple(map(int, text.split(".")[:2])) for text in (theirs, ours))
    said = f"{url} answers, with Prefect {theirs} there and {ours} here"
    if there[0] != here[0]:
        return fail(NAME, said, "Install the same major version on both.")
    if there < here:
        return warn(NAME, said, "Update the server. It should not be older than its clients.")
    return ok(NAME, said)


def _clock_of(url: str) -> tuple[float | None, float]:
    # A server's clock, or None if it does not answer, and this host's clock.
    from prefect.settings import PREFECT_API_SSL_CERT_FILE, PREFECT_API_TLS_INSECURE_SKIP_VERIFY

    date = None
    try:
        tls = trusting(PREFECT_API_SSL_CERT_FILE.value(), anybody=PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value())
        with urllib.request.urlopen(f"{url}/health", timeout=_TIMEOUT_S, context=tls) as answer:
            date = answer.headers["Date"]
    except urllib.error.HTTPError as error:
        date = error.headers["Date"]
    except (OSError, ValueError):
        pass
    asked_at = time.time()
    with contextlib.suppress(TypeError, ValueError):
        return parsedate_to_datetime(date).timestamp(), asked_at
    return None, asked_at


# The operators that `zerotune.flows.prepare` builds, by DeepSpeed's names.
_COMMON_OPS = {"cpu": ("deepspeed_shm_comm", "fused_adam", "cpu_adam"), "cuda": ("fused_adam", "cpu_adam")}
_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def doctor_command(as_json: bool) -> int:
    began = time.monotonic()
    checks = examine(Path.cwd())
    failed = any(check.verdict is Verdict.FAIL for check in checks)
    if as_json:
        document = {
            "healthy": not failed,
            "seconds": round(time.monotonic() - began, 1),
            "checks": [{**vars(check), "verdict": check.verdict.value} for check in checks],
            "replaced": [row._asdict() for row in REPLACED],
        }
        print_document(document)
    else:
        for check in checks:
            _tell(check)
        click.echo("\nA trial replaces functions in the process of your program (--json names them):")
        for row, before in zip(REPLACED, (None, *REPLACED), strict=False):
            is_next = before is not None and before.library == row.library
            click.echo(f"{'' if is_next else row.library:20}{row.why}")
    return int(failed)


def examine(work_dir: Path) -> list[Check]:
    """Returns the checks of this host, of the servers, and of the folders that a study in `work_dir` would write to."""
    interpreter = default_interpreter()
    environment = with_build_folder(rank_environment(interpreter), interpreter)
    with ThreadPoolExecutor() as pool:
        # These take seconds each, so they run at the same time.
        asked = pool.submit(environment_report, interpreter, environment)
        there = pool.submit(devices)
        prefect = pool.submit(check_prefect)
        mlflow = pool.submit(check_mlflow, work_dir)
        found, device = _devices_found(there)
        # After the check for other processes on the devices, which would find this one.
        tries = device is not None and not kind_of(device).computes_on_the_processor
        trying = pool.submit(tried_devices, interpreter, environment) if tries else None
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
        HOST_LOCKS: host_lock_dir(),
    }
    return [
        check_accelerators(found, report, tried),
        *check_devices(found),
        check_environment(interpreter, report),
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
    # The devices and their kind. Returns the driver's error and None if the driver does not answer.
    try:
        found = there.result()
    except InputError as error:
        return error, None
    return found, found.host.device


def _tell(check: Check) -> None:
    # Prints a check. A rich table would break a remedy into lines, and a broken command cannot be copied.
    mark = click.style(f"{check.verdict.value:5}", fg=_COLOURS[check.verdict], bold=check.verdict is not Verdict.OK)
    click.echo(f"{mark}{check.name:15}{_shown(check.said)}")
    if check.remedy:
        click.echo(f"{'':5}{'':15}-> {_shown(check.remedy)}")


def _shown(text: str) -> str:
    # A text without secrets, because people pass on what the doctor said.
    return known_here().hide(plain(text))
