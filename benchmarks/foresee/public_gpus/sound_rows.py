"""Rows of a file as the other modules can use them: numbers are numbers, and what a row leaves out is filled in. Pure.

A line that is no row, or a row that contradicts itself, becomes a row that says why in `unusable`. So a file never
stops at one of its lines.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

MISTAKES = ValueError, TypeError, ArithmeticError, LookupError, AttributeError, AssertionError
"""What the arithmetic on a strange row may raise. Such a row is named, and stops no other."""

_COUNTS = (
    *("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq_len", "micro_batch", "grad_accum", "gpus"),
    *("gpus_per_node", "tensor_parallel", "pipeline_parallel", "sequence_parallel"),
)
_FIGURES = (
    *("params", "gpu_memory_gib", "peak_memory_gib", "tokens_per_s_per_gpu", "samples_per_s", "step_time_s"),
    *("tflops_per_gpu", "mfu"),
)
_WORDS = ("source", "framework", "model", "gpu_kind", "precision", "optimizer")
_SWITCHES = ("activation_checkpointing", "flash_attention")
_KINDS = {"ds": dict, "use_for": list, "missing": list}
_NOTHING = ("", "unknown", "not stated", "none", "null", "n/a", "?", "-", "auto")
_UNITS = {"m": 1e6, "b": 1e9, "t": 1e12}
_FITTED, _FAILED = "completed", "out_of_memory"


def rows_of(text: str) -> list[dict[str, Any]]:
    """Returns a row for each line of a file that is not empty, in its order. Each has an `id` of its own."""
    found, seen = [], set()
    lines = [(number, line) for number, line in enumerate(text.splitlines(), start=1) if line.strip()]
    for number, line in lines:
        row = _row(line, f"line {number}")
        if row["id"] in seen:
            row["id"] = f"{row['id']} (line {number})"
        seen.add(row["id"])
        found.append(row)
    return found


def _row(line: str, place: str) -> dict[str, Any]:
    try:
        plain = json.loads(line)
    except ValueError as error:
        return {"id": place, **_filled({}), "unusable": f"no JSON: {error}"}
    if not isinstance(plain, dict):
        return {"id": place, **_filled({}), "unusable": "no JSON object"}
    number = plain.get("id")
    return sound({**plain, "id": number if isinstance(number, int | str) and number != "" else place})


def sound(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row whose fields have their types. A field that states nothing is left out.

    A row that cannot be used says why in `unusable`.
    """
    found, wrong = dict(row), []
    for name in (*_COUNTS, *_FIGURES):
        if name not in found:
            continue
        value = _number(found.pop(name), k=1024 if name == "seq_len" else 1000)
        if value is not None and (math.isnan(value) or value <= 0 or (name in _COUNTS and not value.is_integer())):
            wrong.append(f"{name} is {row[name]!r}")
        elif value is not None:
            # A number that is one stays as it is written.
            same = type(row[name]) in (int, float) and not (name in _COUNTS and isinstance(row[name], float))
            found[name] = row[name] if same else int(value) if name in _COUNTS else value
    found = {name: value for name, value in found.items() if value is not None}
    if isinstance(found.get("use_for"), str):
        found["use_for"] = re.findall(r"\w+", found["use_for"])
    for name, kind in _KINDS.items():
        if name in found and not isinstance(found[name], kind):
            wrong.append(f"{name} is {found.pop(name)!r}")
    if "ds" in found:
        settings = {str(name): _setting(value) for name, value in found["ds"].items()}
        found["ds"] = {name: value for name, value in settings.items() if value is not None}
    found = _filled(found)
    if _number(row.get("zero_stage")) is not None and "zero_stage" not in found:
        wrong.append(f"zero_stage is {row['zero_stage']!r}")
    wrong += _contradictions(found)
    return {**found, "unusable": "; ".join(wrong)} if wrong else found


def _number(value: Any, k: int = 1000) -> float | None:
    """Returns a number that may be written as `2,048`, `16k` or `7B`; NaN if it is none, None if nothing is stated."""
    if value is None or (isinstance(value, str) and value.strip().lower() in _NOTHING):
        return None
    if isinstance(value, bool):
        return math.nan
    if isinstance(value, int | float):
        return float(value)
    written = re.fullmatch(r"~?\s*([0-9][0-9,_]*\.?[0-9]*(?:e[0-9]+)?)\s*([kmbt]?)", str(value).strip().lower())
    if written is None:
        return math.nan
    return float(re.sub("[,_]", "", written[1])) * {**_UNITS, "k": k}.get(written[2], 1)


def _setting(value: Any) -> Any:
    """Returns a setting of DeepSpeed as a number, a switch, or words such as `auto`; None if it is none of them."""
    if isinstance(value, str):
        number = _number(value)
        return value if number is None or math.isnan(number) else number
    return value if isinstance(value, bool | int | float) else None


def _filled(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row with the fields that no module can do without."""
    for name in _WORDS:
        row[name] = str(row.get(name) or "")
    for name in _SWITCHES:
        if isinstance(row.get(name), str) and row[name].strip().lower() in ("true", "yes", "on", "false", "no", "off"):
            row[name] = row[name].strip().lower() in ("true", "yes", "on")
    for name in ("tensor_parallel", "pipeline_parallel", "sequence_parallel"):
        row.setdefault(name, 1)
    for name in ("offload_optimizer", "offload_param"):
        row[name] = _offload(row.get(name))
    stage = _stage(row)
    row.pop("zero_stage", None)
    if stage is not None:
        row["zero_stage"] = stage
    if "gpu_memory_gib" not in row and (size := re.search(r"(\d+) ?gi?b", row["gpu_kind"].lower())):
        row["gpu_memory_gib"] = int(size[1])
    failed = re.search(r"out.?of.?memory|oom|no.?fit|does not fit", str(row.get("outcome") or "").lower())
    row["outcome"] = _FAILED if failed else _FITTED
    if "use_for" not in row:
        row["use_for"] = _uses(row)
    return row


def _offload(value: Any) -> str:
    if isinstance(value, dict):
        value = value.get("device")
    words = str(value).strip().lower()
    return "none" if value in (None, False) else "cpu" if value is True else words


def _stage(row: Mapping[str, Any]) -> int | None:
    """Returns the ZeRO stage that a row states, or the one that its framework stands for."""
    written = str(row.get("zero_stage") or "").strip().lower() if row.get("zero_stage") != 0 else "0"
    if written not in _NOTHING:
        stated = re.match(r"(?:zero|stage)?[\s_-]*([0-3])\b", written)
        return int(stated[1]) if stated else None
    words = row["framework"].lower()
    if named := re.search(r"zero[\s_-]*([0-3])", words):
        return int(named[1])
    if "fsdp" in words:
        return 3
    return 0 if re.search(r"\bddp\b", words) or row.get("gpus") == 1 else None


def _uses(row: Mapping[str, Any]) -> list[str]:
    speeds = ("tokens_per_s_per_gpu", "samples_per_s", "tflops_per_gpu", "mfu")
    peak = ["peak_memory"] if "peak_memory_gib" in row and row["outcome"] == _FITTED else []
    speed = ["throughput"] if any(name in row for name in speeds) else []
    return [*speed, *peak, "fit" if row["outcome"] == _FITTED else "no_fit"]


def _contradictions(row: Mapping[str, Any]) -> list[str]:
    def over(whole: str, part: str) -> Sequence[str]:
        have = row.get(whole), row.get(part)
        return [f"{whole} {have[0]} is no multiple of {part} {have[1]}"] if all(have) and have[0] % have[1] else []

    pairs = [("hidden", "heads"), ("heads", "kv_heads"), ("gpus", "tensor_parallel"), ("seq_len", "sequence_parallel")]
    return [each for pair in pairs for each in over(*pair)]
