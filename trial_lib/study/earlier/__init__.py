"""Earlier studies of the same experiment, and what a new study takes from them."""
