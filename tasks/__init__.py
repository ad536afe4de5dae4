"""Prefect tasks, one step each. No other package uses a Prefect run."""
