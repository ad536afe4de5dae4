"""Switches that a rank turns in the user's program: activation checkpointing, compilation, the attention function."""
