"""What a rank asks of the device that it trains on."""
