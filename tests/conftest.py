"""What do all tests share? A Hypothesis profile: no deadlines, the same draws."""

from __future__ import annotations

import pytest
from hypothesis import settings

settings.register_profile("tessera", deadline=None, derandomize=True, max_examples=60)
settings.load_profile("tessera")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--refresh-golden", action="store_true", help="write the files of tests/golden anew"
    )
