"""A host's devices, as seen from outside a rank, without importing torch."""
