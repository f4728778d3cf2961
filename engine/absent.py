"""Keeps scipy out of the node. vLLM and transformers load it where it is installed, for parts that are not used here
(audio, the losses of object detectors): 0.8 s of CPU and 60 MB. It is installed for the sandbox.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

_ONE_AT_A_TIME = threading.Lock()  # replicas start in threads


@contextmanager
def scipy_absent() -> Iterator[None]:
    """While it is entered scipy looks as if it were not installed, for all threads; afterwards it can be imported.

    Does nothing where scipy is loaded, or where transformers has noted that it is there and would miss it.
    """
    with _ONE_AT_A_TIME:
        checks = sys.modules.get("transformers.utils.import_utils")
        if "scipy" in sys.modules or (checks is not None and checks.is_scipy_available()):
            yield
            return
        sys.modules["scipy"] = None  # type: ignore[assignment] # find_spec then finds nothing, and an import fails
        try:
            yield
        finally:
            del sys.modules["scipy"]
