"""Checkpoints of a trial class, and the random states in them."""
