"""The memory model: what a configuration needs of a device and of its host."""
