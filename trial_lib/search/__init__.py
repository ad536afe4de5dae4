"""Which candidate next. Pure: a search knows no clock, no files and no torch."""
