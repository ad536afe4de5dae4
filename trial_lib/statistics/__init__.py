"""Means, ratios and their intervals. Pure, standard library only."""
