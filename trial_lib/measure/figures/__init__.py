"""The figures of a rank: step times, losses, memory and precision; and when the steps are enough."""
