"""Every damage and many cuts, of which the unit tests take a sample."""

import pytest
from hypothesis import settings

from tests.unit.engine.run import test_resume as resume
from tests.unit.engine.run.test_journal import (  # noqa: F401
    test_what_a_damaged_journal_goes_on_with_was_not_drawn_before_a_checkpoint_and_nothing_is_left_out,
    test_without_refills_a_damaged_journal_goes_on_as_if_nothing_had_happened,
)
from tests.unit.engine.run.test_resume import (  # noqa: F401
    light_collections,
    test_whatever_file_of_a_killed_run_is_damaged_it_ends_undisturbed_or_is_refused,
)

pytestmark = pytest.mark.campaign


@pytest.fixture
def every():
    return 1


def many(examples, cases, test):
    return settings(max_examples=examples, deadline=None)(cases(test.hypothesis.inner_test))


test_what_is_trained_is_what_would_have_been = many(
    100, resume.ANY_CUTS, resume.test_what_is_trained_is_what_would_have_been
)
test_with_refills_no_prompt_is_used_twice = many(50, resume.ANY_SEED, resume.test_with_refills_no_prompt_is_used_twice)
