"""Sends the content of a study's folder to MLflow.

The folder is the record. MLflow gets a copy, now or later. MLflow itself is imported only when it is needed.
"""
