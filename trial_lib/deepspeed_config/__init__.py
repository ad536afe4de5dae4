"""DeepSpeed's configuration: reading it, merging into it, its rules, and what the installed DeepSpeed refuses."""
