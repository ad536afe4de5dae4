"""Inside a rank: the user's program under fake tensors, as rank 0 of a pretended world."""
