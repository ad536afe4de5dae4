"""How often nights without a loss raise an alarm, and how soon a slow loss does.

    python -m benchmarks.confirm_aa.nights

Each night has four confirming processes. Their level varies from night to night, normally, with heavy tails (Student's
t, 4 degrees of freedom), or beside improvements of 3 % in one night of ten. A history is read after each night as a
study reads it: at most 20 studies back, and from the last alarm on.
"""

import argparse
import json
import math
from pathlib import Path

import numpy as np

from zerotune.trial_lib.messages.statistics import largest_fall

OUT = Path(__file__).parents[1] / "results" / "nights.json"
# What varies from process to process and from night to night, and what a study assumes of the second beforehand.
MACHINES = {
    "a GPU": (0.005, 0.003, 0.01),
    "processor time": (0.02, 0.02, 0.05),
    "processor time, a restless host": (0.04, 0.05, 0.05),
    "the clock of a CPU": (0.05, 0.06, 0.10),
}
HISTORIES, LONGEST = 100, 20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--histories", type=int, default=HISTORIES)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    found: dict[str, dict[str, object]] = {}
    for name, (process, night, unknown) in MACHINES.items():
        row: dict[str, object] = {}
        for kind in ("normal", "heavy tails", "improvements"):
            counts = [len(alarms(history(rng, 100, process, night, kind), unknown)) for _ in range(options.histories)]
            row[f"alarms in 100 nights without a loss, {kind}"] = round(float(np.mean(counts)), 2)
            row[f"histories with more than one, {kind}"] = round(float(np.mean([count > 1 for count in counts])), 2)
        for loss in (0.005, 0.01, 0.02, 0.05):
            soon = []
            for _ in range(options.histories):
                nights = history(rng, 40, process, night, "normal", loss, after=10)
                soon.append(next((each - 9 for each in alarms(nights, unknown) if each > 9), math.inf))
            row[f"nights until {loss:.1%} a night is told, median and 95 of 100"] = [
                None if math.isinf(nights) else int(nights)
                for nights in np.sort(soon)[[len(soon) // 2, len(soon) * 95 // 100]]
            ]
        found[name] = row
        print(name, json.dumps(row, indent=2))
    options.out.write_text(json.dumps(found, indent=2) + "\n")


def history(
    rng: np.random.Generator, nights: int, process: float, night: float, kind: str, loss: float = 0.0, after: int = 0
) -> list[list[float]]:
    """Throughputs of each night; from `after` on each night loses a share."""
    tails = rng.standard_t(4, nights) / math.sqrt(2) if kind == "heavy tails" else rng.normal(size=nights)
    level = night * tails + math.log(1 - loss) * np.maximum(0, np.arange(nights) - after + 1)
    if kind == "improvements":
        level += np.cumsum((rng.random(nights) < 0.1) * rng.normal(0.03, 0.02, nights).clip(0))
    return [list(np.exp(each + rng.normal(0, process, 4))) for each in level]


def alarms(studies: list[list[float]], unknown: float) -> list[int]:
    told, begin = [], 0
    for now in range(1, len(studies)):
        ratio = largest_fall(studies[max(begin, now - LONGEST) : now + 1], unknown).ratio
        if ratio.high < 1.0 and ratio.value <= 0.98:
            told.append(now)
            begin = now
    return told


if __name__ == "__main__":
    main()
