"""The checks of `zerotune doctor`, each with its remedy."""
