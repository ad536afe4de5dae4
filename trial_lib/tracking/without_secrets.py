"""Removes known secrets from the content of runs, and from the copies of files that MLflow gets."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from trial_lib.secrets.by_value import KnownSecrets
from trial_lib.secrets.sent_command import sent_document, sent_text
from trial_lib.tracking.run_content import IDS, PARAM_CHARACTERS, TAG_CHARACTERS, RunContent, cut
from trial_lib.wire.imported import modules_in

_PAGES = (".html",)
# Of a page: the user's commands and the ends of logs, which may hold anything. They are escaped, so no tag is in them.
_OWN = re.compile(r'(<(pre|td) class="(?:any )?own"[^>]*>)[^<]*(?=</\2>)')
_STAYS = r"\1(in the study's folder)"


def without_secrets(content: RunContent, secrets: KnownSecrets) -> RunContent:
    """Returns the content of a run without secrets. Its files are unchanged."""
    return replace(
        content,
        name=secrets.hide(content.name),
        # Runs are found by these.
        tags={
            name: value if name in IDS else cut(secrets.hide(sent_text(value)), TAG_CHARACTERS)
            for name, value in content.tags.items()
        },
        params={name: cut(secrets.hide(value), PARAM_CHARACTERS) for name, value in content.params.items()},
        # ZeroTune writes no links. One in a folder that somebody has sent may lead to any file of this user's.
        artifacts=[file for file in content.artifacts if not file.is_symlink()],
    )


def shown_copy(file: Path, folder: Path, secrets: KnownSecrets) -> Path:
    """Returns a copy of a file without secrets, under the same name.

    Args:
        file: of a study.
        folder: for the copy.
        secrets: values to hide.
    """
    copy = folder / file.name
    document = _document(file)
    if document is not None:
        if isinstance(document, dict) and "imported" in document:
            # What a program sets in its environment may be a secret that nothing shows.
            document["imported"] = modules_in(document["imported"])
        copy.write_text(json.dumps(secrets.hide_in(sent_document(document, _model_dir(document))), indent=2) + "\n")
    elif file.suffix in _PAGES:
        # The page is drawn from values that may be shown. Text in it that only looks like a secret belongs to a script.
        copy.write_text(secrets.hide_values(_OWN.sub(_STAYS, file.read_text())))
    else:
        with (
            file.open(errors="surrogateescape", newline="") as lines,
            copy.open("w", errors="surrogateescape", newline="") as shown_lines,
        ):
            shown_lines.writelines(map(secrets.hide, lines))
    shutil.copystat(file, copy)
    return copy


def _model_dir(document: Any) -> Path:
    return Path(str(document.get("model_dir", "."))) if isinstance(document, dict) else Path()


def _document(file: Path) -> Any:
    """Returns the content of a JSON file; None for another file, or a damaged one."""
    try:
        return json.loads(file.read_text()) if file.suffix == ".json" else None
    except ValueError:
        return None
