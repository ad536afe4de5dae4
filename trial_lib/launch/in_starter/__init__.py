"""The folder that is put on the PYTHONPATH of a starter (see `trial_lib.launch.starter`)."""
