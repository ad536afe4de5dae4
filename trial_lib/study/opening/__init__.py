"""Opening a study: from the typed command to a driver, with the checks on the way."""
