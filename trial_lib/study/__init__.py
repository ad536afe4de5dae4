"""Driving one study: its plans, its trials, its answer. Knows no Prefect."""
