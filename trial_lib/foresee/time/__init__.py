"""Seconds of a step on a device, from the work of a foreseen run. Pure."""
