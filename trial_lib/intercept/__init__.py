"""Standing in for functions of the user's libraries."""
