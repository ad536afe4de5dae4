"""The order of work: Prefect flows, and the command line that starts them."""
