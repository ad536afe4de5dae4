"""Bytes on a device and on its host, from the events of a foreseen run. Pure."""
