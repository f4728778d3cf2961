"""A forked process says why it died; one that is killed says nothing."""

import logging
import logging.config
import os
import signal

import pytest

from engine.process.last_words import LONGEST, LastWords

LOGGER = "tests.last_words"


def forked(words, end):
    """Runs `end` in a child of this thread, to its end."""
    with words.kept():
        pid = os.fork()
        if not pid:
            try:
                end()
            finally:
                os._exit(1)
    os.waitpid(pid, 0)
    return words.read()


def dies_of(error):
    def end():
        try:
            raise error
        except type(error):
            logging.getLogger(LOGGER).exception("it failed to start")

    return end


@pytest.fixture
def words():
    words = LastWords(LOGGER)
    logging.getLogger(LOGGER).propagate = False
    yield words
    words.close()


def test_the_parent_reads_what_its_child_died_of(words):
    assert (
        forked(words, dies_of(RuntimeError("size mismatch\n  for lm_head")))
        == "RuntimeError: size mismatch for lm_head"
    )


@pytest.mark.parametrize(("error", "said"), [(KeyError(), "KeyError"), (ValueError("x" * 10_000), "ValueError: xxx")])
def test_words_are_one_short_line(words, error, said):
    found = forked(words, dies_of(error))
    assert found.startswith(said)
    assert len(found) <= LONGEST
    assert "\n" not in found


def test_the_last_exception_counts_alone(words):
    def end():
        dies_of(ValueError("a long message about the first cause"))()
        dies_of(OSError("short"))()

    assert forked(words, end) == "OSError: short"


def test_one_that_is_killed_says_nothing(words):
    assert forked(words, lambda: os.kill(os.getpid(), signal.SIGKILL)) == ""
    words.close()
    assert words.read() == ""


def test_each_child_has_its_own(words):
    others = LastWords(LOGGER)
    forked(others, dies_of(OSError("of the other")))
    assert words.read() == ""
    assert "of the other" in others.read()
    others.close()


def test_what_this_process_logs_itself_is_nobodys(words):
    dies_of(RuntimeError("here"))()
    assert words.read() == ""


def test_a_library_that_configures_its_logging_late_takes_nothing_away(words):
    def end():
        parent = LOGGER.partition(".")[0]
        logging.config.dictConfig({"version": 1, "loggers": {parent: {}}, "disable_existing_loggers": False})
        dies_of(RuntimeError("as it is"))()

    assert forked(words, end) == "RuntimeError: as it is"
