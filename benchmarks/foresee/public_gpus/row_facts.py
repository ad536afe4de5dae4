"""The facts of a row that its words have: which memory was measured, which loss, whether it was compiled.

`rows.jsonl` has them as fields of their own. Another file of rows may have them in `memory_kind`, `framework` and
`note` alone, as its sources say them.
"""

import re
from collections.abc import Mapping
from typing import Any

KINDS_OF_MEMORY = ("allocated", "allocated at failure", "reserved", "shown", "unknown", "upper bound")


def facts_of(row: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a row with the fields that its words stand for. A row that has them stays as it is."""
    found = {name: value for name, value in row.items() if name != "note"}
    note = str(row.get("note") or "").lower()
    words = f"{row.get('framework', '')} {row.get('optimizer', '')}".lower()
    said = f"{words} {note}"
    if row.get("peak_memory_gib"):
        found["memory_kind"] = memory_kind(str(row.get("memory_kind") or "unknown"), str(row.get("outcome")))
    kernels = str(row.get("framework_config"))
    if "foak" in kernels:
        # A kernel of Unsloth, after transformers has made logits of 32 bits. Rows that name Liger have the same peaks.
        found.setdefault("loss", "in place" if "gpt_bigcode" in str(row.get("model")) else "wide in place")
    elif "loss" not in row and (loss := _loss(said)):
        found["loss"] = loss
    if lora := re.search(r"lora_dim (\d+) added on top of full training", note):
        found.setdefault("lora", int(lora[1]))
    elif re.search(r"\bq?(lora|dora)\b|\bpeft\b", f"{said} {row.get('model', '')}".lower()) and not re.search(
        r"\b(no|without|not) (q?lora|peft)", said
    ):
        found.setdefault("trains_adapters_alone", True)
    if "compile" in words:
        found.setdefault("compiled", True)
    if "checkpoint" in note and re.search(r"in[- ]cpu(?! off)", note):
        found.setdefault("checkpoints_in_host", True)
    if "ac off" in note and not row.get("compiled"):
        found["activation_checkpointing"] = False
    return found


def memory_kind(words: str, outcome: str = "completed") -> str:
    """Returns one of `KINDS_OF_MEMORY`.

    Args:
        words: as a source says them.
        outcome: of the run.
    """
    if words in KINDS_OF_MEMORY:
        return words
    lower = words.lower()
    if "upper bound" in lower:
        return "upper bound"
    if "failure" in lower or (outcome == "out_of_memory" and "alloc" in lower):
        return "allocated at failure"
    if re.search(r"nvidia.?smi", lower):
        return "shown"
    # The first figure counts: "max allocated; max reserved 22 GiB" is of an allocated one.
    figure = re.search(r"peak active|allocated|reserved", lower)
    if figure is None:
        return "unknown"
    return "reserved" if figure[0] == "reserved" else "allocated"


def _loss(words: str) -> str:
    if re.search(r"no lm head|value head", words):
        return "value head"
    if re.search(r"(fused|liger|cut)[a-z -]*(cross|ce\b|loss)|liger", words):
        return "fused"
    return "chunked" if re.search(r"chunked[a-z -]*(cross|ce\b|loss)|chunked ce", words) else ""
