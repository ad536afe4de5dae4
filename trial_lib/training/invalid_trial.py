"""The error for a trial class that breaks the API."""


class InvalidTrialError(Exception):
    """The user's trial breaks the API. The message says what, where and the remedy."""
