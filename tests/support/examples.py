"""How many examples hypothesis tries, and which.

`make test` tries the same ones each time, so that it never fails by chance. `make campaigns` (the profile "search")
tries more, drawn from a seed that it prints: `make campaigns SEED=...` tries those again, and a test that fails prints
a line `@reproduce_failure(...)` for its own case.
"""

from hypothesis import HealthCheck, settings

SEARCH = 3  # times as many examples


def load_profiles() -> None:
    """Called by conftest.py, before any test is imported; --hypothesis-profile then chooses another one."""
    # No deadline of an example: it would measure what else the machine does.
    common = {"deadline": None, "suppress_health_check": [HealthCheck.too_slow], "print_blob": True}
    settings.register_profile("repeat", derandomize=True, **common)
    settings.register_profile("search", max_examples=SEARCH * 100, **common)
    settings.load_profile("repeat")


def examples(count: int, *, search: int | None = None) -> settings:
    """Returns so many examples in `make test`, and `search` (three times as many by default) in `make campaigns`."""
    if settings.get_current_profile_name() == "search":
        return settings(max_examples=search or SEARCH * count)
    return settings(max_examples=count)
