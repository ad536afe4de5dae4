"""The rooms of ZeroTune whose functions run among the user's own."""

OWN_ROOMS = ("measure", "flops", "intercept", "leave_alone", "turned")
"""Tracebacks of the user's leave their frames out."""

NEVER_COMPILED = (*(room for room in OWN_ROOMS if room != "turned"), "turned.own_ways")
"""Dynamo compiles none of their functions. It compiles a recomputed block, which would be in pieces otherwise."""
