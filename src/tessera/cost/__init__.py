"""What will it cost? FLOPs, bytes and times, used by building, balancing and planning alike."""
