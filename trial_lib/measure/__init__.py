"""Inside a rank: watches an engine, counts, times and ends the measurement. Needs nothing but torch and DeepSpeed."""
