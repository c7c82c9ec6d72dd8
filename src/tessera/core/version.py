"""The version, and the distribution's name for pip; constants, as a source tree has no metadata."""

VERSION = "0.1.0"
DISTRIBUTION = "tessera-spmd"
