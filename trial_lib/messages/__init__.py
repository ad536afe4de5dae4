"""What a driver and its ranks tell each other, and the files that carry it. Standard library only."""
