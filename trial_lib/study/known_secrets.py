"""Secrets whose values are known: a trial's log may say them without the name that gives them away."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trial_lib.experiment.environment import REDACTED, redact, redact_text
from trial_lib.experiment.errors import InputError
from trial_lib.experiment.yaml_document import read_yaml

_SHORTEST = 6  # a shorter value also stands in words that are none


@dataclass(frozen=True)
class KnownSecrets:
    """Values that are shown nowhere, the longest first."""

    values: tuple[str, ...]

    @classmethod
    def of(cls, experiment: Path) -> "KnownSecrets":
        """Returns those of an experiment's YAML, and of this process's environment, which its trials inherit."""
        try:
            written = read_yaml(experiment).data
        except InputError:
            written = {}
        return cls.within(written)

    @classmethod
    def within(cls, written: Mapping[str, Any]) -> "KnownSecrets":
        """Returns those of what stands in an experiment's YAML, and of this process's environment."""
        found = {*_hidden(written, redact(written)), *_hidden(dict(os.environ), redact(os.environ))}
        return cls(tuple(sorted((value for value in found if len(value) >= _SHORTEST), key=len, reverse=True)))

    def hide(self, text: str) -> str:
        """Returns a text without them, and without what looks like a secret."""
        for value in self.values:
            text = text.replace(value, REDACTED)
        return redact_text(text)


def _hidden(value: Any, shown: Any) -> Iterator[str]:
    """Yields what stands in a value, and not in that which may be shown of it."""
    if isinstance(value, Mapping) and isinstance(shown, Mapping):
        for name, inner in value.items():
            yield from _hidden(inner, shown[name])
    elif isinstance(value, (list, tuple)) and isinstance(shown, (list, tuple)):
        for inner, inner_shown in zip(value, shown, strict=True):
            yield from _hidden(inner, inner_shown)
    elif isinstance(value, str) and value != shown:
        parts = "(.+?)".join(re.escape(part) for part in str(shown).split(REDACTED))
        between = re.fullmatch(parts, value, re.DOTALL)
        yield from between.groups() if between else ()
