"""The batches that a program feeds: their size, their source, the longest of them."""
