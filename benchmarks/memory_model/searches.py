"""Replays searches on the recorded tables: how many of their trials run out of memory, and what they lose by caution.

python -m benchmarks.memory_model.searches

With `--name before`, and run with an earlier commit's product, it keeps that commit's figures beside today's.
"""

import argparse
import json
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.memory_model.foresee import FORESEEN, REPLAY
from benchmarks.memory_model.record import HELD_OUT, TABLES
from benchmarks.replay.run import course_of

RESULTS = Path(__file__).parents[1] / "results" / "memory_searches.json"
# Seeds of a folder's tables. Those of the second have one trial of a candidate, so seeds differ by little.
SEEDS = {REPLAY / "tables": 4, TABLES: 2}
TRIALS, BUDGETS = 20, (3, 5, 10, 20)


def figures(path: Path, foreseen: Path | None, seeds: int) -> dict[str, Any]:
    """Returns what searches on a table lose, and how many of their trials run out of memory."""
    tasks = [(path.stem, path.parent, foreseen, "adaptive", seed, TRIALS, 1) for seed in range(seeds)]
    courses = [course_of(task)[2] for task in tasks]
    counts = [len(course.regrets) for course in courses]
    return {
        "trials": sum(counts),
        "out_of_memory": round(sum(c.out_of_memory * n for c, n in zip(courses, counts, strict=True))),
        "mean_regret_after_trials": {n: round(fmean(c.after_trials(n) for c in courses), 4) for n in BUDGETS},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="after")
    name = parser.parse_args().name
    record: dict[str, Any] = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    found = record[name] = {"command": f"python -m benchmarks.memory_model.searches --name {name}"}
    for prior, foreseen in (("formulas", None), ("foreseen", FORESEEN)):
        tables = {
            path.stem: figures(path, foreseen, seeds)
            for folder, seeds in SEEDS.items()
            for path in sorted(folder.glob("*.jsonl"))
            if path.stem not in HELD_OUT
        }
        trials, failed = (sum(each[key] for each in tables.values()) for key in ("trials", "out_of_memory"))
        regrets = [each["mean_regret_after_trials"] for each in tables.values()]
        together = {
            "trials": trials,
            "out_of_memory": failed,
            "share_out_of_memory": round(failed / trials, 4),
            "mean_regret_after_trials": {n: round(fmean(each[n] for each in regrets), 4) for n in BUDGETS},
        }
        found[prior] = {"all": together, "tables": tables}
        print(name, prior, together, {key: each["out_of_memory"] for key, each in tables.items()}, flush=True)
    RESULTS.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
