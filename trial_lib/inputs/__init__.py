"""What the user gives: a command, or the YAML of an experiment, read, checked and completed."""
