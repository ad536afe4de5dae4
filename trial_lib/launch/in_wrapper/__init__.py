"""The folder that comes first on a wrapper's PYTHONPATH (see `trial_lib.launch.wrapper`)."""
