"""Judges probabilities of fitting and intervals of peaks on tables that their constants do not come from.

python -m benchmarks.memory_model.calibration

Each program of the recorded tables is left out in turn. The shares of the shapes of peaks are those of the others
(`benchmarks/memory_model/shapes.py`), and the model meets the program as a study does: the profile, the user's own
configuration, and then trials that it expects to fit. After some numbers of trials it is asked about what has not run.
"""

import argparse
import json
import math
import random
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

import numpy as np

from benchmarks.memory_model.record import HELD_OUT
from benchmarks.memory_model.shapes import Program, log_likelihoods, observe, programs, shares
from benchmarks.replay.recorded import TableRow, key_of
from zerotune.trial_lib.records.result import Outcome
from zerotune.trial_lib.search.memory_model import SHAPES, Shapes, measured_above_initialize

RESULTS = Path(__file__).parents[1] / "results" / "memory_model.json"
HELD_OUT_RESULTS = RESULTS.with_name("memory_model_held_out.json")
FIGURE = Path(__file__).parents[2] / "docs" / "images" / "memory_calibration.svg"
AFTER = (0, 1, 2, 4, 8, 16)  # trials, the user's own configuration the first
_COURSES, _ASKED = 2, 40  # of a table; candidates that are asked about at a time
_LIKELY, _LARGEST = 0.9, 0.6  # a trial fits with that probability, and mostly is the largest that does
_SURE = 0.95
_LEAST, _ROUNDS = 1e-4, 25  # of the map: the least probability, and steps of Newton's
_OPEN = 0.1, 0.9  # probabilities between which neither end is likely
_FEWEST_PROGRAMS = 3


@dataclass(frozen=True)
class Answer:
    """What the model said of a candidate, and what its trial showed."""

    program: str
    table: str
    after: int  # trials of the program that it had seen
    fits: float | None  # the probability; None if a trial had decided it
    completed: bool
    place: float | None  # probability of a smaller peak than the measured one; None if it ran out of memory
    error: float | None  # of the expected peak, as a share


def answers(program: Program, shapes: Shapes | None, seed: int) -> Iterator[Answer]:
    """Yields what the model says in one course of trials."""
    draws = random.Random(seed)
    model = program.model(shapes)
    model.observe_profile(*program.world.profile(draws))
    left: dict[str, list[TableRow]] = {}
    for row in program.rows:
        left.setdefault(key_of(row.candidate), []).append(row)

    def asked() -> Iterator[Answer]:
        for key in draws.sample(sorted(left), min(_ASKED, len(left))):
            candidate = left[key][0].candidate
            described = model._describe(candidate.knobs)
            decided = model._decided(described, candidate) is not None
            fits = None if decided else model.probability_fits(candidate, headroom=0.0)
            mixture = model._predict(described, model._allocations(described, candidate))
            row = draws.choice(left[key])
            peak = measured_above_initialize(row.memory)
            if row.outcome is Outcome.COMPLETED and peak is not None:
                error = abs(mixture.quantile(0.5) / peak - 1)
                yield Answer(program.name, program.table.head.name, ran, fits, True, mixture.below(peak), error)
            else:
                yield Answer(program.name, program.table.head.name, ran, fits, False, None, None)

    for ran in range(max(AFTER) + 1):
        if ran in AFTER:
            yield from asked()
        if not left:
            break
        key = _own(program, left) if ran == 0 else _next(model.probability_fits, left, draws)
        observe(model, draws.choice(left.pop(key)))


def _own(program: Program, left: dict[str, list[TableRow]]) -> str:
    submitted = program.world.submitted

    def distance(key: str) -> tuple[bool, int]:
        candidate = left[key][0].candidate
        return candidate.knobs != submitted.knobs, abs(candidate.micro_batch_size - submitted.micro_batch_size)

    return min(sorted(left), key=distance)


def _next(fits: Any, left: dict[str, list[TableRow]], draws: random.Random) -> str:
    knobs = left[draws.choice(sorted(left))][0].candidate.knobs
    family = sorted((rows[0].candidate.micro_batch_size, key) for key, rows in left.items() if _knobs(rows) == knobs)
    likely = [key for _, key in family if fits(left[key][0].candidate, 0.0) >= _LIKELY]
    if not likely:
        return family[0][1]
    return likely[-1] if draws.random() < _LARGEST else draws.choice(likely)


def _knobs(rows: Sequence[TableRow]) -> dict[str, Any]:
    return rows[0].candidate.knobs


def figures(given: Sequence[Answer]) -> dict[str, Any]:
    """Returns the shares of peaks in their intervals, and the frequencies beside the probabilities, in ten bins."""
    places = [each.place for each in given if each.place is not None]
    said = [(each.fits, each) for each in given if each.fits is not None]
    sure = [(fits, each) for fits, each in said if fits >= _SURE]
    return {
        "peaks": len(places),
        "in_the_90_percent_interval": _share(0.05 <= place <= 0.95 for place in places),
        "below_it": _share(place < 0.05 for place in places),
        "above_it": _share(place > 0.95 for place in places),
        "median_error": round(median(error for each in given if (error := each.error) is not None), 4),
        "probabilities": len(said),
        "mean_probability": round(fmean(fits for fits, _ in said), 4),
        "fitted": _share(each.completed for _, each in said),
        "over_95_percent": {
            "cases": len(sure),
            "expected_failures": round(sum(1 - fits for fits, _ in sure), 2),
            "failures": sum(not each.completed for _, each in sure),
        },
        "more_fitted_than_said": more_than_said(given),
        "bins": [_bin([(fits, each) for fits, each in said if min(9, int(10 * fits)) == place]) for place in range(10)],
    }


def more_than_said(given: Sequence[Answer]) -> tuple[float, float] | None:
    """Returns the share that fitted less the probability, between its ends: the mean over tables, and its error. The
    cases of a table hang together, so each table counts once. None if there are fewer than two.
    """
    by_table: dict[str, list[float]] = {}
    for each in given:
        if each.fits is not None and _OPEN[0] <= each.fits < _OPEN[1]:
            by_table.setdefault(each.table, []).append(each.completed - each.fits)
    means = [fmean(differences) for differences in by_table.values()]
    return (round(fmean(means), 4), round(stdev(means) / math.sqrt(len(means)), 4)) if len(means) > 1 else None


def _bin(said: Sequence[tuple[float, Answer]]) -> dict[str, Any] | None:
    if not said:
        return None
    by_program: dict[str, list[bool]] = {}
    for _, each in said:
        by_program.setdefault(each.program, []).append(each.completed)
    fitted = [each.completed for _, each in said]
    return {
        "said": round(fmean(fits for fits, _ in said), 4),
        "fitted": _share(fitted),
        "cases": len(said),
        "programs": len(by_program),
        "binomial_interval": binomial_interval(sum(fitted), len(fitted)),
        "interval_by_programs": _by_programs(list(by_program.values())),
    }


def binomial_interval(hits: int, cases: int, z: float = 1.96) -> tuple[float, float]:
    """Returns Wilson's interval of a share."""
    share, room = hits / cases, z * z / cases
    middle = (share + room / 2) / (1 + room)
    half = z / (1 + room) * math.sqrt(share * (1 - share) / cases + room / cases / 4)
    return round(max(0.0, middle - half), 4), round(min(1.0, middle + half), 4)


def _by_programs(fitted: Sequence[Sequence[bool]]) -> tuple[float, float] | None:
    # The cases of a program hang together. So programs are drawn, as if others had been recorded. A single one says
    # nothing of others.
    if len(fitted) < _FEWEST_PROGRAMS:
        return None
    draws, shares = random.Random(0), []
    for _ in range(1000):
        drawn = draws.choices(fitted, k=len(fitted))
        shares.append(sum(map(sum, drawn)) / sum(map(len, drawn)))
    shares.sort()
    return round(shares[25], 4), round(shares[974], 4)


def _share(cases: Iterable[bool]) -> float | None:
    cases = list(cases)
    return round(sum(cases) / len(cases), 4) if cases else None


def judged(is_foreseen: bool, names: Collection[str]) -> Iterator[tuple[Program, Shapes | None, list[Answer]]]:
    """Yields each program with the shapes of all others, and the answers. Programs with names have the product's."""
    known = programs(is_foreseen, names)
    likelihoods = [] if names else [log_likelihoods(program) for program in known]
    for program in known:
        others = [each for other, each in zip(known, likelihoods, strict=False) if other.name != program.name]
        shapes = shares(others, SHAPES["cpu", is_foreseen]) if others else None
        yield program, shapes, [each for seed in range(_COURSES) for each in answers(program, shapes, seed)]


def with_a_map(given: Sequence[Answer]) -> dict[str, Any]:
    """Returns what a monotone map of the probabilities would do: two constants on the scale of logarithms of odds,
    fitted to all programs but the one that is judged.
    """
    said = [each for each in given if each.fits is not None]
    fits = np.clip([each.fits or 0.0 for each in said], _LEAST, 1 - _LEAST)
    odds = np.stack([np.ones(len(said)), np.log(fits / (1 - fits))], axis=1)
    fitted, programs_of = np.array([each.completed for each in said]), np.array([each.program for each in said])
    mapped, constants = np.empty(len(said)), []
    for program in sorted(set(programs_of)):
        others, own, weights = programs_of != program, programs_of == program, np.array([0.0, 1.0])
        for _ in range(_ROUNDS):
            expected = 1 / (1 + np.exp(-odds[others] @ weights))
            curvature = (odds[others] * (expected * (1 - expected))[:, None]).T @ odds[others]
            weights = weights + np.linalg.solve(curvature, odds[others].T @ (fitted[others] - expected))
        mapped[own] = 1 / (1 + np.exp(-odds[own] @ weights))
        constants.append(weights)
    judged_anew = [replace(each, fits=float(fits)) for each, fits in zip(said, mapped, strict=True)]
    low, high = np.min(constants, axis=0), np.max(constants, axis=0)
    return {
        "constants": [[round(float(end), 3) for end in ends] for ends in zip(low, high, strict=True)],
        "loss": _loss(fits, fitted),
        "loss_with_map": _loss(np.clip(mapped, _LEAST, 1 - _LEAST), fitted),
        "bins_with_map": figures(judged_anew)["bins"],
    }


def _loss(fits: Any, fitted: Any) -> float:
    # The logarithmic loss, summed.
    return round(float(-np.log(np.where(fitted, fits, 1 - fits)).sum()), 1)


def show(name: str, found: dict[str, Any]) -> None:
    bins = " ".join(f"{each['said']:.2f}:{each['fitted']:.2f}({each['cases']})" for each in found["bins"] if each)
    inside, below, error = (found[key] for key in ("in_the_90_percent_interval", "below_it", "median_error"))
    print(
        f"{name:14s} {inside:.1%} of {found['peaks']} peaks inside, {below:.0%} below, {error:.1%} off; "
        f"{found['over_95_percent']}; {bins}",
        flush=True,
    )


_SIZE, _LEFT, _TOP = 300, 60, 50


def drawn(record: dict[str, Any]) -> str:
    """Returns the figure: how often candidates fitted, beside what was said."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{2 * (_SIZE + 90)}" height="{_SIZE + 120}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for place, kind in enumerate(record["kinds"]):
        left = _LEFT + place * (_SIZE + 90)

        def at(said: float, fitted: float, left: int = left) -> tuple[float, float]:
            return round(left + _SIZE * said, 1), round(_TOP + _SIZE * (1 - fitted), 1)

        corners = " ".join(
            f"{x},{y}" for x, y in (at(0, 0.05), at(0.95, 1), at(1, 1), at(1, 0.95), at(0.05, 0), at(0, 0))
        )
        parts.append(f'<polygon points="{corners}" fill="#ddd"/>')
        parts.append(f'<rect x="{left}" y="{_TOP}" width="{_SIZE}" height="{_SIZE}" fill="none" stroke="#888"/>')
        for tick in (0, 0.2, 0.4, 0.6, 0.8, 1):
            x, y = at(tick, tick)
            parts.append(f'<text x="{x}" y="{_TOP + _SIZE + 18}" text-anchor="middle">{tick:g}</text>')
            parts.append(f'<text x="{left - 8}" y="{y + 4}" text-anchor="end">{tick:g}</text>')
        middle = left + _SIZE / 2
        parts.append(f'<text x="{middle}" y="{_TOP - 18}" text-anchor="middle" font-size="14">{kind}</text>')
        parts.append(f'<text x="{middle}" y="{_TOP + _SIZE + 38}" text-anchor="middle">probability of fitting</text>')
        for each in filter(None, record["kinds"][kind]["all"]["bins"]):
            x, y = at(each["said"], each["fitted"])
            if each["interval_by_programs"]:
                low, high = (at(0, end)[1] for end in each["interval_by_programs"])
                parts.append(f'<line x1="{x}" x2="{x}" y1="{low}" y2="{high}" stroke="#1f4e9c"/>')
            parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="#1f4e9c"/>')
    legend = "Each program with the shapes of the others; lines are 95 % intervals over programs."
    parts.append(f'<text x="{_LEFT}" y="{_TOP + _SIZE + 62}">{legend}</text>')
    parts.append(
        f'<text x="16" y="{_TOP + _SIZE / 2}" text-anchor="middle" transform="rotate(-90 16 {_TOP + _SIZE / 2})">'
        "share that fitted</text></svg>"
    )
    return "\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--held-out", action="store_true", help="judge the tables that no constant comes from")
    is_held_out = parser.parse_args().held_out
    path = HELD_OUT_RESULTS if is_held_out else RESULTS
    words = "python -m benchmarks.memory_model.calibration" + " --held-out" * is_held_out
    record: dict[str, Any] = {"command": words, "courses_of_a_table": _COURSES, "kinds": {}}
    for is_foreseen, kind in ((False, "from formulas"), (True, "foreseen")):
        tables: dict[str, Any] = {}
        together: list[Answer] = []
        for program, shapes, given in judged(is_foreseen, HELD_OUT if is_held_out else ()):
            name = program.table.head.name
            tables[name] = figures(given) if shapes is None else {"shapes": asdict(shapes), **figures(given)}
            together += given
            show(name, tables[name])
        after = {n: figures([each for each in together if each.after == n]) for n in AFTER}
        record["kinds"][kind] = {"all": figures(together), "after_trials": after, "tables": tables}
        if not is_held_out:
            record["kinds"][kind]["with_a_map"] = with_a_map(together)
        show(kind, record["kinds"][kind]["all"])
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    if not is_held_out:
        FIGURE.write_text(drawn(record), encoding="utf-8")


if __name__ == "__main__":
    main()
