"""What is asked of a host's devices from outside a rank, without importing torch."""
