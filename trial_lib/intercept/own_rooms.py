"""The rooms of ZeroTune whose functions run among the user's own."""

OWN_ROOMS = ("measure", "flops", "intercept", "leave_alone", "turned")
"""Tracebacks of the user's leave their frames out, and Dynamo compiles none of their functions."""
