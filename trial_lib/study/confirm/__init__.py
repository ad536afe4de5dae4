"""Confirmation: the best few and the user's configuration are measured again in fresh processes."""
