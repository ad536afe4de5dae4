"""Opening a study: from what was typed to a driver, and what is checked on the way."""
