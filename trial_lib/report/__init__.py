"""Reads a study from its folder and shows it as tables, figures and a page."""
