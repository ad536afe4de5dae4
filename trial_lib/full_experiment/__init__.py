"""One training at full length: opening it, driving it, its metrics."""
