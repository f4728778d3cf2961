"""What all tests share."""

import gc

import pytest


@pytest.fixture(autouse=True, scope="module")
def frozen():
    """What was imported so far stays out of collections: the stage that learns makes one in each step."""
    gc.collect()
    gc.freeze()
