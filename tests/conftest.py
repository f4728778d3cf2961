"""What all tests share."""

import gc


def pytest_collection_finish() -> None:
    """What was imported stays out of collections: the stage that learns makes one in each step."""
    gc.collect()
    gc.freeze()
