"""Devices, with one file for each kind."""
