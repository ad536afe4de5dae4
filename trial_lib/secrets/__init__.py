"""Secrets, and text without them."""
