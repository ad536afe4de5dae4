"""Earlier studies of the same experiment, and what a new one takes from them."""
