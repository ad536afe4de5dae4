"""`zerotune doctor`: it checks for common problems and prints a remedy for each. It changes nothing."""

import contextlib
import time
from email.utils import parsedate_to_datetime
from importlib.metadata import version
from pathlib import Path

import click
import httpx

from zerotune.flows.prefect_server import is_configured
from zerotune.flows.terminal import print_document
from zerotune.trial_lib.doctor import Check, Verdict, examine, fail, ok, trusting, warn
from zerotune.trial_lib.inputs.known_secrets import known_here
from zerotune.trial_lib.messages.errors import plain
from zerotune.trial_lib.rank.patching import REPLACED

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

    asked_at = time.time()
    with contextlib.suppress(httpx.HTTPError, OSError, KeyError, ValueError):
        tls = trusting(PREFECT_API_SSL_CERT_FILE.value(), anybody=PREFECT_API_TLS_INSECURE_SKIP_VERIFY.value())
        date = httpx.get(f"{url}/health", timeout=_TIMEOUT_S, verify=tls).headers["Date"]
        asked_at = time.time()
        return parsedate_to_datetime(date).timestamp(), asked_at
    return None, asked_at


_COLOURS = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "red"}


def doctor_command(as_json: bool) -> int:
    began = time.monotonic()
    checks = examine(Path.cwd(), check_prefect)
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


def _tell(check: Check) -> None:
    # Prints a check. A rich table would break a remedy into lines, and a broken command cannot be copied.
    mark = click.style(f"{check.verdict.value:5}", fg=_COLOURS[check.verdict], bold=check.verdict is not Verdict.OK)
    click.echo(f"{mark}{check.name:15}{_shown(check.said)}")
    if check.remedy:
        click.echo(f"{'':5}{'':15}-> {_shown(check.remedy)}")


def _shown(text: str) -> str:
    # A text without secrets, because people pass on what the doctor said.
    return known_here().hide(plain(text))
