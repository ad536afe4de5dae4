import pytest

from zerotune.trial_lib.messages.statistics import t_quantile


@pytest.mark.parametrize(
    ("probability", "degrees", "tabulated"),
    [
        # NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2.
        (0.95, 1, 6.314),
        (0.99, 1, 31.821),
        (0.975, 2, 4.303),
        (0.99, 2, 6.965),
        (0.995, 2, 9.925),
        (0.99, 3, 4.541),
        (0.95, 4, 2.132),
        (0.999, 5, 5.893),
        (0.9, 10, 1.372),
        (0.975, 29, 2.045),
        (0.99, 100, 2.364),
    ],
)
def test_the_quantiles_are_those_of_the_tables(probability, degrees, tabulated):
    assert t_quantile(probability, degrees) == pytest.approx(tabulated, abs=6e-4)
