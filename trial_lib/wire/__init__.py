"""The messages between a driver and its ranks, and the files that carry them. Standard library only."""
