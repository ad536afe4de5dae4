"""The search methods. They choose the next candidate. Pure: a search uses no clock, no files and no torch."""
