"""Forking and reflection tokens: phrases over several tokens, tool calls, and what follows a reply."""

import numpy as np

from engine.diagnosis.token_kinds import mark


def test_phrases_are_found_over_tokens_in_any_case_as_whole_words_and_not_in_calls():
    texts = [
        "Hm",
        "m, ",
        "DOUB",
        "LE che",
        "ck it",
        ".",
        " rebut butter",
        " let\n",
        "me",
        "<tool_call>",
        "wait",
        "</tool_call>",
        " wait",
    ]
    marks = mark(texts, [(0, len(texts))])
    assert np.flatnonzero(marks.forking_T).tolist() == [0, 1, 2, 3, 4, 7, 8, 12]
    assert [phrase for phrase in marks.phrase_T if phrase] == ["hmm", "double check", "let me", "wait"]
    assert np.flatnonzero(marks.call_T).tolist() == [9, 10, 11]
    unclosed = mark(["a", "<tool_call>", "{"], [(0, 3)])
    assert unclosed.call_T.tolist() == [False, True, True], "a call that the budget has cut off"


def test_what_follows_a_reply_is_counted_from_it_and_what_was_given_is_of_no_kind():
    marks = mark([" wait"] * 9, [(2, 4), (6, 9)])
    assert marks.after_reply_T.tolist() == [0, 0, 0, 0, 0, 0, 1, 2, 3]
    assert marks.turn_T.tolist() == [-1, -1, 0, 0, -1, -1, 1, 1, 1]
    assert marks.forking_T.tolist() == [False, False, True, True, False, False, True, True, True]
