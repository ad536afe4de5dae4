"""What a study's folder holds, sent on to MLflow.

The folder is the record; MLflow gets a copy, now or later. MLflow itself is imported where it is first needed.
"""
