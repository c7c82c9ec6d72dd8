"""The local view: bodies that see one device's blocks."""
