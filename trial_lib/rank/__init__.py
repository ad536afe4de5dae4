"""What runs inside a rank: it measures the user's training, and leaves the user's files alone."""
