"""Which environment variables look like secrets, and keeping them out of what people read."""

import re
from collections.abc import Mapping

REDACTED = "<redacted>"

_SECRET_NAME = re.compile(
    r"(token|secret|passw(or)?d|passphrase|pgpass|_pwd|credential|key|auth)s?(?![a-z])", re.IGNORECASE
)
_PASSWORD_IN_URL = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def redact(variables: Mapping[str, str]) -> dict[str, str]:
    """Returns environment variables fit for logs, tags and reports: values that look like secrets are left out.

    Args:
        variables: name to value, as a process finds them.

    Example:
        >>> redact({"HF_TOKEN": "hf_abc", "TOKENIZERS_PARALLELISM": "false"})
        {'HF_TOKEN': '<redacted>', 'TOKENIZERS_PARALLELISM': 'false'}
    """
    return {
        name: REDACTED if _SECRET_NAME.search(name) or _PASSWORD_IN_URL.search(value) else value
        for name, value in variables.items()
    }
