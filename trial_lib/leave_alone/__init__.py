"""Code that keeps a trial away from the user's files, checkpoints, experiment runs and swap folders."""
