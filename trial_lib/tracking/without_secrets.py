"""What MLflow gets goes without the secrets that are known: what a run says, and its files, of which it gets copies."""

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.tracking.run_content import IDS, PARAM_CHARACTERS, TAG_CHARACTERS, RunContent, cut

_PAGES = (".html",)


def without_secrets(content: RunContent, secrets: KnownSecrets) -> RunContent:
    """Returns what a run says without secrets; its files are as they were."""
    return replace(
        content,
        name=secrets.hide(content.name),
        # A run is looked for by these.
        tags={
            name: value if name in IDS else cut(secrets.hide(value), TAG_CHARACTERS)
            for name, value in content.tags.items()
        },
        params={name: cut(secrets.hide(value), PARAM_CHARACTERS) for name, value in content.params.items()},
    )


def shown_copy(file: Path, folder: Path, secrets: KnownSecrets) -> Path:
    """Returns a copy of a file without secrets, under the same name.

    Args:
        file: of a study.
        folder: where the copy goes.
        secrets: what it goes without.
    """
    copy = folder / file.name
    document = _document(file)
    if document is not None:
        copy.write_text(json.dumps(secrets.hide_in(document), indent=2) + "\n")
    elif file.suffix in _PAGES:
        # Drawn from what may be shown. What only looks like a secret is a script's.
        copy.write_text(secrets.hide_values(file.read_text()))
    else:
        with (
            file.open(errors="surrogateescape", newline="") as lines,
            copy.open("w", errors="surrogateescape", newline="") as shown_lines,
        ):
            shown_lines.writelines(map(secrets.hide, lines))
    shutil.copystat(file, copy)
    return copy


def _document(file: Path) -> Any:
    """Returns what stands in a file of JSON; None where it is another, or damaged."""
    try:
        return json.loads(file.read_text()) if file.suffix == ".json" else None
    except ValueError:
        return None
