"""One step each: Prefect tasks, the only place that knows a Prefect run."""
