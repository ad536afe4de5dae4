"""People read quantities with a unit and a prefix."""

import pytest

from zerotune.trial_lib.records.units import bytes_shown, interval, quantity


@pytest.mark.parametrize(
    ("value", "unit", "shown"),
    [
        (3.268e8, "FLOP/s", "326.8 MFLOP/s"),
        (9.89e14, "FLOP/s", "989.0 TFLOP/s"),
        (0.5, "FLOP/s", "0.5 FLOP/s"),
        (0.0004, "s", "0.4 ms"),
        (1.0, "s", "1 s"),
        (72.25, "s", "72.2 s"),
        (4.256, "samples/s", "4.26 samples/s"),
        (12345.67, "samples/s", "12,345.7 samples/s"),
    ],
)
def test_a_quantity(value: float, unit: str, shown: str) -> None:
    assert quantity(value, unit) == shown


def test_an_interval_has_one_unit() -> None:
    assert interval(0.9e9, 0.8e9, 1.1e9, "FLOP/s") == "900 MFLOP/s (800 to 1100)"
    assert interval(150.0, 145.0, 155.0, "samples/s") == "150 samples/s (145 to 155)"


@pytest.mark.parametrize(
    ("count", "shown"),
    [(0, "0 bytes"), (2048, "2 KiB"), (3 * 2**20 // 2, "1.5 MiB"), (600 * 2**20, "600 MiB"), (2**41, "2.0 TiB")],
)
def test_bytes(count: int, shown: str) -> None:
    assert bytes_shown(count) == shown
