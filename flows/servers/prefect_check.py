"""The doctor's check of Prefect: the configured server, its version and its clock."""

import contextlib
import time
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from importlib.metadata import version

from flows.servers.prefect_server import is_configured
from trial_lib.doctor.check import Check, fail, ok, warn
from trial_lib.doctor.tls import trusting

NAME = "Prefect"
_TIMEOUT_S = 5
_LOGIN = "Set PREFECT_API_AUTH_STRING, or PREFECT_API_KEY for Prefect Cloud."


def check_prefect() -> tuple[Check, float | None, float]:
    """Checks the Prefect server that a study would use.

    Returns:
        The check, the server's clock and this host's clock at the same moment. Clocks are in seconds since the epoch.
        The server's is None if it does not answer.
    """
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
    """Returns a server's clock, or None if it does not answer, and this host's clock."""
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
