"""Cost models: FLOPs, bytes and times, for building, balancing and planning."""
