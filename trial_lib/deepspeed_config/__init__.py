"""DeepSpeed's configuration: reading it, merging into it, its rules, and the refusals of the installed DeepSpeed."""
