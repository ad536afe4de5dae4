"""One training at full length: how it is opened and driven, and its metrics."""
