"""A trial leaves the user's files, checkpoints, runs and swap folders alone."""
