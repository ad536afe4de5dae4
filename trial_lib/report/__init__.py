"""A study read from its folder, and shown: tables, figures, a page."""
