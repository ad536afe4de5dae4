"""Replacements for functions of the user's libraries."""
