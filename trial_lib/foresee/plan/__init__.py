"""`zerotune plan`: foreseen runs of the arms become a table, an answer and a page."""
