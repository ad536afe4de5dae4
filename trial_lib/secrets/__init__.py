"""What is secret, and text without it."""
