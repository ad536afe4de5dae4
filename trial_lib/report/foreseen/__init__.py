"""The page of a plan: what devices that are not there would do."""
