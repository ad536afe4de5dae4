"""The processes on the ranks' side: they run in the user's environment."""
