"""The ends of a rank: its program ends, stands still, or starts ranks of its own."""
