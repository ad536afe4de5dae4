"""What `zerotune doctor` checks, each check with its remedy."""
