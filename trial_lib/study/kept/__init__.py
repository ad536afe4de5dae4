"""A study's folder: finding it, its history, copies of it, the room on its disk."""
