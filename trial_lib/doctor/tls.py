"""The certificates that the doctor trusts in a request by https: those that the server's own client trusts."""

import ssl
from pathlib import Path

import certifi


def trusting(bundle: str | None, *, anybody: bool) -> ssl.SSLContext:
    """Returns the context of a request.

    Args:
        bundle: a file, or a folder, of certificates. None for those that Python's clients bring along.
        anybody: whether any certificate is accepted.

    Raises:
        OSError: the file is missing, or has no certificate.
    """
    if anybody:
        context = ssl.create_default_context()
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
        return context
    trusted = bundle or certifi.where()
    if Path(trusted).is_dir():
        return ssl.create_default_context(capath=trusted)
    return ssl.create_default_context(cafile=trusted)
