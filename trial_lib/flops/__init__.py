"""Model FLOPs and saved activations of a micro-batch."""
