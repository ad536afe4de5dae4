"""Sends a study's folder, which is the record, to MLflow, now or later. MLflow is imported only when it is needed."""
