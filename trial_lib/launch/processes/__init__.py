"""The processes on the ranks' side. They run in the user's environment."""
