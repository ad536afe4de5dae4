"""How often the search is wrong about a change that it has seen to be worth more than the margin.

    python -m benchmarks.confirm_aa.seen

Such a change stays in the winner without a round of its own. `adaptive` searches the tables that were recorded on CPU
ranks. Then the expected worth of each change of its best candidate (a knob, the arm, the micro-batch) is compared with
the table's own.
"""

import argparse
import copy
import json
import math
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from benchmarks.replay.driver import simulate
from benchmarks.replay.methods import create
from benchmarks.replay.run import TABLES, world_of
from benchmarks.replay.world import World
from zerotune.trial_lib.records.candidate import Candidate
from zerotune.trial_lib.search.base import Search
from zerotune.trial_lib.search.knobs import set_knob
from zerotune.trial_lib.study.reduction import FAR, MARGINS

OUT = Path(__file__).parents[1] / "results" / "seen_changes.json"
WORLDS = ("convnet", "recurrent", "transformer")
TRIALS = (8, 20)


def changes_of(best: Candidate, search: Search, world: World) -> Iterator[Candidate]:
    """Candidates that differ from the best in one knob, in the arm, or in the micro-batch."""
    found = search.space.locate(best.knobs)
    if found is None:
        return
    arm, size = search.space.arms[found[0]], best.micro_batch_size
    for knob, position in arm.positions(found[1]):
        for value in knob.values[:position] + knob.values[position + 1 :]:
            knobs = copy.deepcopy(dict(best.knobs))
            set_knob(knobs, knob.path, value)
            yield world.candidate(knobs, size)
    yield from (world.candidate(other.family(0), size) for other in search.space.arms if other is not arm)
    yield from (world.candidate(best.knobs, other) for other in world.grid if other != size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    found: dict[str, dict[str, int]] = {}
    for name in WORLDS:
        for trials in TRIALS:
            counts = Counter[str]()
            for seed in range(options.seeds):
                world = world_of(name, TABLES, seed)
                search = create("adaptive", world, seed, trials)
                simulate(search, world, seed, stops_hopeless=True)
                if search.best is None:
                    continue
                best = search.best[0]
                for other in changes_of(best, search, world):
                    truth, own = world.truth(other), world.truth(best)
                    expected = search.apart(other, best)
                    if not truth or not own or expected is None:
                        continue
                    mean, deviation = expected
                    worth = math.log(own / truth)
                    counts["changes"] += 1
                    counts["their intervals miss the worth"] += abs(worth - mean) > FAR * deviation
                    for margin in MARGINS:
                        bound = -math.log(1.0 - margin)
                        is_seen = mean - FAR * deviation > bound
                        counts[f"seen to be worth more than {margin:.0%}"] += is_seen
                        counts[f"seen to be worth more than {margin:.0%}, and are not"] += is_seen and worth < bound
            found[f"{name}, {trials} trials"] = dict(counts)
            print(name, trials, json.dumps(found[f"{name}, {trials} trials"]), flush=True)
    total = Counter[str]()
    for each in found.values():
        total.update(each)
    report = {"seeds": options.seeds, "all": dict(total), **found}
    print(json.dumps(report["all"]))
    options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()
