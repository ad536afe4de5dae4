"""The rooms whose functions run among the user's own."""

OWN_ROOMS = ("measure", "flops", "intercept", "leave_alone")
"""Their frames are not shown with the user's, and nothing of them is compiled."""
