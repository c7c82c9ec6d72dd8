"""Names of checkpoints and of their files."""

from __future__ import annotations

import re

NAME = "manifest.json"
MOST_BYTES = 1 << 30  # of a manifest
TAG = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
DATA = re.compile(r"data-[0-9a-f]{12}-\d{5}-\d{5}\.bin")
