"""Where the time of a step goes: some steps under torch's profiler, after the counted ones."""
