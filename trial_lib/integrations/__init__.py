"""What training code of other kinds than a trial class uses of ZeroTune: the Core API, and helpers for Hugging Face.

It runs inside a rank, in the user's environment: neither Prefect, MLflow nor pydantic is imported.
"""
