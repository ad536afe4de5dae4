"""The one error for mistakes in a user's input."""


class InputError(Exception):
    """Input that cannot be used: the mistake, its place, and the remedy.

    The command line prints it as one message and exits with code 2, before it has started anything.

    Attributes:
        what: one sentence on the mistake, with the value.
        where: a file (with line and column if known), a key or a flag.
        remedy: one sentence on how to mend it.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        """Takes the three parts of the message, which the class documents."""
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        """Returns the whole message, `where: what remedy`."""
        return f"{self.where}: {self.what} {self.remedy}"
