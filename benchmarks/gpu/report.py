"""What a stage writes: each finding at once, so that a stage that is cut off has left what it found until then."""

import json
import time
from pathlib import Path
from typing import Any

from zerotune.trial_lib.messages.files import write_whole

PASS, FAIL, LEFT_OUT = "pass", "fail", "left out"


class Report:
    """The JSON file of a stage.

    Args:
        path: of the file.
        stage: its name.
        device: `cuda` or `cpu`.
    """

    def __init__(self, path: Path, stage: str, device: str) -> None:
        self._path = path
        self._started = time.monotonic()
        self._content: dict[str, Any] = {"stage": stage, "device": device, "checks": [], "figures": {}, "notes": []}
        self._write()

    def check(self, name: str, holds: bool, said: str = "") -> bool:
        """Notes whether something holds that was to be shown."""
        return self._add(name, PASS if holds else FAIL, said) == PASS

    def leave_out(self, name: str, why: str) -> None:
        """Notes something that cannot be shown here."""
        self._add(name, LEFT_OUT, why)

    def figure(self, name: str, value: Any) -> None:
        """Notes what was measured."""
        self._content["figures"][name] = value
        self._write()

    def note(self, text: str) -> None:
        """Notes what ZeroTune has said meanwhile."""
        self._content["notes"].append(text)
        self._write()

    def end(self) -> None:
        """Notes that the stage has come to its end."""
        self._content["ended"] = "by itself"
        self._write()

    def _add(self, name: str, outcome: str, said: str) -> str:
        self._content["checks"].append({"name": name, "outcome": outcome, "said": said})
        print(f"{outcome}: {name}{': ' if said else ''}{said}", flush=True)
        self._write()
        return outcome

    def _write(self) -> None:
        self._content["seconds"] = round(time.monotonic() - self._started, 1)
        write_whole(self._path, json.dumps(self._content, indent=1))


def table(folder: Path, stages: list[str]) -> tuple[str, bool]:
    """Returns what stages have found, as lines for people, and whether nothing failed and all came to their ends."""
    lines = [f"{'stage':<11}{'seconds':>8}{'passed':>8}{'failed':>8}{'left out':>10}  ended"]
    details: list[str] = []
    is_well = True
    for stage in stages:
        content = read(folder, stage)
        outcomes = [check["outcome"] for check in content["checks"]]
        counts = [outcomes.count(outcome) for outcome in (PASS, FAIL, LEFT_OUT)]
        ended = content.get("ended", "not at all")
        lines.append(f"{stage:<11}{content['seconds']:>8}{counts[0]:>8}{counts[1]:>8}{counts[2]:>10}  {ended}")
        is_well = is_well and ended == "by itself" and FAIL not in outcomes
        details += [
            f"{stage}: {check['outcome']}: {check['name']}: {check['said']}"
            for check in content["checks"]
            if check["outcome"] != PASS
        ]
        details += [f"{stage}: {line}" for line in content.get("last_words", [])]
    return "\n".join([*lines, *(["", *details] if details else [])]), is_well


def name_of(stage: str, part: tuple[int, int]) -> str:
    """Returns what the file of a part of a stage is called, less its suffix; a stage in one part is called as it is."""
    number, parts = part
    return stage if parts == 1 else f"{stage}-{number}"


def merge(folder: Path, stage: str, parts: int) -> None:
    """Makes one file of those of a stage's parts, in the order of the parts."""
    if parts == 1:
        return
    names = [name_of(stage, (number, parts)) for number in range(parts)]
    whole = [read(folder, name) for name in names]
    figures: dict[str, Any] = {}
    for content in whole:
        for name, value in content["figures"].items():
            there = figures.get(name)
            if isinstance(there, dict) and isinstance(value, dict):
                figures[name] = there | value
            else:
                figures[name] = there + value if isinstance(there, list) and isinstance(value, list) else value
    ends = [content.get("ended", "not at all") for content in whole]
    merged = {
        "stage": stage,
        "device": whole[0].get("device"),
        "parts at once": parts,
        "checks": [check for content in whole for check in content["checks"]],
        "figures": figures,
        "notes": [note for content in whole for note in content.get("notes", [])],
        "seconds": max(content["seconds"] for content in whole),
        "ended": next((end for end in ends if end != "by itself"), "by itself"),
        "last_words": [line for content in whole for line in content.get("last_words", [])],
    }
    write_whole(folder / f"{stage}.json", json.dumps(merged, indent=1))
    for name in names:
        (folder / f"{name}.json").unlink(missing_ok=True)


def read(folder: Path, stage: str) -> dict[str, Any]:
    """Returns what a stage has written; one that did not start has found nothing."""
    path = folder / f"{stage}.json"
    nothing: dict[str, Any] = {"stage": stage, "checks": [], "figures": {}, "seconds": 0.0, "ended": "not started"}
    return json.loads(path.read_text()) if path.exists() else nothing


def complete(folder: Path, stage: str, **how: Any) -> None:
    """Adds to what a stage has written how its process ended, as who started it has seen."""
    content = read(folder, stage) | how
    write_whole(folder / f"{stage}.json", json.dumps(content, indent=1))
