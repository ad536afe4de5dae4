"""The one error for a trial class that breaks the API."""


class InvalidTrialError(Exception):
    """The user's trial does something that the API does not allow; the message says what, where and the remedy."""
