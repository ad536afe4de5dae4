"""A process's own devices, as PyTorch sees them in the user's environment."""
