"""The version, and the name by which pip knows this package. They stand here, as a tree that is not
installed has no metadata."""

VERSION = "0.1.0"
DISTRIBUTION = "tessera-spmd"
