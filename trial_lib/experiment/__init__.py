"""What the user wrote: the YAML of an experiment, read, checked and completed."""
