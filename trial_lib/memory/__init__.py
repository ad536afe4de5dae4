"""The memory model: the memory that a configuration needs on a device and on its host."""
