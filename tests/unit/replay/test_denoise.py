"""What noisy repeats let expect of the candidates of a table."""

import math
import random

import pytest

from benchmarks.replay.denoise import Cell, expected_logs

NOISE = 0.08
SIZES = (2, 4, 8, 16, 32)


def true_log(family, size):
    return math.log(100 / (1 + 6 / size)) + 0.03 * (family % 3)


def cells_of(draws, families=12):
    return [
        Cell(family // 6, family, size, tuple(true_log(family, size) + draws.gauss(0, NOISE) for _ in range(2)))
        for family in range(families)
        for size in SIZES
    ]


def test_without_noise_the_mean_of_the_repeats_is_the_truth():
    cells = [Cell(0, 0, 2, (1.0, 1.2)), Cell(0, 0, 4, (2.0,))]
    assert expected_logs(cells, 0.0) == pytest.approx([1.1, 2.0])


def test_the_expected_is_nearer_to_the_truth_than_the_mean_of_the_repeats():
    cells = cells_of(random.Random(0))
    truths = [true_log(cell.family, cell.size) for cell in cells]
    means = [sum(cell.logs) / 2 for cell in cells]

    def error(values):
        return sum((value - truth) ** 2 for value, truth in zip(values, truths, strict=True))

    assert error(expected_logs(cells, NOISE)) < 0.5 * error(means)


def test_the_best_is_not_the_luckiest():
    cells = cells_of(random.Random(1))
    best = max(true_log(cell.family, cell.size) for cell in cells)
    luckiest = max(sum(cell.logs) / 2 for cell in cells)
    assert abs(max(expected_logs(cells, NOISE)) - best) < 0.5 * (luckiest - best)


def test_what_stands_out_of_the_noise_stays():
    draws = random.Random(2)
    cells = [
        Cell(cell.arm, cell.family, cell.size, tuple(value + (0.5 if cell.family == 3 else 0) for value in cell.logs))
        for cell in cells_of(draws)
    ]
    expected = expected_logs(cells, NOISE)
    gaps = [
        value - true_log(cell.family, cell.size)
        for cell, value in zip(cells, expected, strict=True)
        if cell.family == 3
    ]
    assert min(gaps) > 0.35
