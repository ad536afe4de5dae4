"""How far off the ratio of two foreseen speeds is: `python -m benchmarks.foresee.public_gpus.ratios`.

Pairs are trainings of one source, model and length of samples, on two kinds of devices, two numbers of them, or both.
Of several trainings on the same devices the median counts.
"""

import json
import math
from collections import defaultdict
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles

_ROWS = Path(__file__).with_name("rows.jsonl")
_SPEEDS = Path(__file__).parents[2] / "results" / "foreseen_speed.json"


def main() -> None:
    known = {row["id"]: row for row in map(json.loads, _ROWS.read_text().splitlines())}
    errors: dict[tuple[str, ...], dict[tuple[str, int], list[float]]] = defaultdict(lambda: defaultdict(list))
    for each in json.loads(_SPEEDS.read_text())["rows"]:
        row = known[each["id"]]
        group = row["source"], row["model"], row["seq_len"], row["framework"]
        errors[group][row["gpu_kind"], row["gpus"]].append(math.log(each["foreseen"] / each["measured"]))
    pairs: dict[str, list[tuple[str, float]]] = defaultdict(list)
    for group, of_devices in errors.items():
        for ((kind, count), one), ((other_kind, other_count), other) in combinations(of_devices.items(), 2):
            what = "another number" if kind == other_kind else "another kind"
            what += " and number" if kind != other_kind and count != other_count else ""
            pairs[what].append((group[0], abs(median(one) - median(other))))
    for what, found in pairs.items():
        off = [math.expm1(error) for _, error in found]
        sources = len({source for source, _ in found})
        print(
            f"{what}: {len(off)} pairs of {sources} sources, {median(off):.0%}, 9 of 10 {quantiles(off, n=10)[-1]:.0%}"
        )


if __name__ == "__main__":
    main()
