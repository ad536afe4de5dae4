"""The batches that a program feeds to its engine: their size, its source, and the longest batch."""
