"""The first figures of `docs/plan.md` are those of the results."""

import json
import re
from pathlib import Path

import pytest

from benchmarks.foresee.public_gpus import fit_memory, fit_speed

PAGE = Path(__file__).parents[3] / "docs" / "plan.md"
# Rows of the page's first table, and the parts of the results that they are of.
MEMORY = {
    "allocated memory, all weights trained": ("allocated, all weights",),
    "allocated memory, LoRA": ("allocated, adapters",),
    "memory as reserved, or as `nvidia-smi` shows it": ("shown", "reserved"),
}


def said(name: str) -> tuple[float, int, int]:
    """The error in percent, the rows in the interval, and all rows, of a row of the page."""
    found = re.search(rf"^\| {re.escape(name)} \| ([\d.]+) % \| (\d+) of (\d+) \|$", PAGE.read_text(), re.MULTILINE)
    assert found, name
    return float(found[1]), int(found[2]), int(found[3])


@pytest.mark.parametrize("name", MEMORY)
def test_memory(name: str) -> None:
    results = json.loads(fit_memory.RESULTS.read_text())["each source left out"]
    parts = [results[part] for part in MEMORY[name]]
    error, within, rows = said(name)
    assert rows == sum(each["rows"] for each in parts)
    assert within == sum(round(each["rows"] * each["share"]) for each in parts)
    assert error == pytest.approx(100 * parts[0]["median_error"], abs=0.5)


def test_memory_beside_weights_of_few_bits() -> None:
    results = json.loads(fit_memory.RESULTS.read_text())["weights of few bits"]
    parts = [each for part, each in results.items() if part.startswith("allocated")]
    error, within, rows = said("allocated memory, LoRA beside weights of 4 bits (QLoRA, GPTQ)")
    assert (within, rows) == tuple(sum(each[key] for each in parts) for key in ("within", "rows"))
    assert all(error == pytest.approx(100 * each["median_error"], abs=0.5) for each in parts)


def test_speed() -> None:
    results = json.loads(fit_speed.RESULTS.read_text())
    error, within, rows = said("samples/s")
    assert (error, rows) == (round(100 * results["median_error"], 1), results["rows"])
    assert within == round(results["rows"] * results["within_90"])
    assert f"With them, speed is {100 * results['all rows']['median_error']:.1f} % off" in PAGE.read_text()


def test_fits() -> None:
    summary = json.loads((fit_memory.RESULTS.parent / "foreseen_memory.json").read_text())["rows"]
    known = [each for each in summary if "fits" in each]
    sure, hardly = ([each for each in known if each["fits"] > 0.95], [each for each in known if each["fits"] < 0.2])
    fitted = [sum(each["fitted"] for each in some) for some in (sure, hardly)]
    words = f"{len(known)} known rows, {fitted[0]} of {len(sure)} that are foreseen to fit with over 95 % fitted, and "
    assert words + f"{fitted[1]} of {len(hardly)} below 20 %" in " ".join(PAGE.read_text().split())
