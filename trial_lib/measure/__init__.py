"""Inside a rank: watch an engine, count, time, stop. Needs nothing but torch and DeepSpeed."""
