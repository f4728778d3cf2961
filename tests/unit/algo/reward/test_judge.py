"""How the answers of a judge are read, and settings that are refused."""

import pytest

from algo.reward.judge import json_score, regex_score
from algo.reward.judge_endpoint import JudgeConfig


@pytest.mark.parametrize(
    "field", ["max_tokens", "request_s", "tries", "in_flight", "max_requests", "max_total_tokens", "cached"]
)
def test_settings_that_mean_nothing_name_the_field(field):
    with pytest.raises(ValueError, match=field):
        JudgeConfig(url="", model="", **{field: 0})
    for other in ("temperature", "backoff_s"):
        with pytest.raises(ValueError, match=other):
            JudgeConfig(url="", model="", **{other: -1.0})


@pytest.mark.parametrize("text", ['{"score": 1}', ' {"score": 1.0, "why": "x"}\n', '```json\n{"score": 1}\n```'])
def test_a_score_in_json(text):
    assert json_score()(text) == 1.0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "1",
        "[1]",
        "{}",
        "[" * 100_000,
        '{"score": true}',
        '{"score": "1"}',
        '{"score": NaN}',
        '{"score": 1.1}',
        '{"score": -1}',
        'I say {"score": 1}',
        '{"score": 1} {"score": 0}',
    ],
    ids=lambda text: text[:24],
)
def test_what_is_no_score_in_json_is_refused(text):
    with pytest.raises(ValueError, match=r"score|JSON"):
        json_score()(text)


def test_a_score_by_a_pattern_stands_there_once():
    read = regex_score(r"Score: (\d+)", highest=10)
    assert read("Well. Score: 7") == 7.0
    for text in ("Score: 11", "Score: x", "He says 'Score: 10', but Score: 2"):
        with pytest.raises(ValueError, match="score"):
            read(text)
    with pytest.raises(ValueError, match="group"):
        regex_score(r"Score: \d+")
