"""Which version is this? Read here, as a tree that is not installed has no metadata."""

VERSION = "0.1.0"
