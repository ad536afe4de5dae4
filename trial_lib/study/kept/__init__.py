"""The study's folder: finding it, its history, copies of it, and the room on its disk."""
