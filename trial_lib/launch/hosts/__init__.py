"""One trial over the hosts of a hostfile."""
