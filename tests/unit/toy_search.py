"""A search method that a test adds."""

from zerotune.trial_lib.search.dsat import RandomSearch


class ToySearch(RandomSearch):
    """Draws as `random` does."""
