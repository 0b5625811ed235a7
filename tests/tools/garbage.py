"""A collection of garbage that takes no longer after many tests than after few.

Tests import this file. An example that does: pytest tests/vattention/test_vattention.py
"""

import gc

import pytest


@pytest.fixture(scope="module", name="little_garbage")
def look_at_little_garbage() -> None:
    """From here on, a collection looks only at what the tests of this file make: of what others have imported, it takes
    half a second."""
    gc.collect()
    gc.freeze()
