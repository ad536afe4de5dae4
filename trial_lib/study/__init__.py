"""One run of the tuning flow: its arguments, its history, its trials and its answer. Knows no Prefect."""
