"""Data loaders and samplers of a trial class."""
