"""What a study foresees of its program before any trial."""
