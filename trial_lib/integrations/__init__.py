"""The parts of ZeroTune for training code that is no trial class: the Core API, and helpers for Hugging Face.

They run inside a rank, in the user's environment: neither Prefect, MLflow nor pydantic is imported.
"""
