"""Servers: Prefect's, MLflow's, and all that `zerotune up` starts."""
