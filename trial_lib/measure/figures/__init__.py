"""The figures of a rank: step times, losses, memory, precision, and when there are enough steps."""
