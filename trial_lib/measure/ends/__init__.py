"""The ends of a rank: its program ends, hangs, or starts ranks of its own."""
