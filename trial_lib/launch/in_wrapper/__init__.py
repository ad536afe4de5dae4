"""The folder that comes first on a wrapper's PYTHONPATH (see `zerotune.trial_lib.launch.wrapper`)."""
