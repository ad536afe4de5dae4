"""The one error for what a user typed or wrote wrong."""


class InputError(Exception):
    """Input that cannot be used: says what is wrong, where it stands, and what to do.

    The command line prints it as one message and exits with code 2; nothing has been started by then.

    Attributes:
        what: one sentence on what is wrong, with the value.
        where: a file (with line and column where known), a key or a flag.
        remedy: one sentence on how to mend it.
    """

    def __init__(self, what: str, *, where: str, remedy: str) -> None:
        """Takes the three parts of the message; the class says what each is."""
        super().__init__(what, where, remedy)
        self.what = what
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        """Returns the whole message, `where: what remedy`."""
        return f"{self.where}: {self.what} {self.remedy}"
