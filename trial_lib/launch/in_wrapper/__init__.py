"""The folder that is put on the PYTHONPATH of a wrapper (see `trial_lib.launch.wrapper`)."""
