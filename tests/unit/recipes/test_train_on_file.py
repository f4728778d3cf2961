"""What a model is asked for by a recipe that trains on a file of the user's."""

import pytest

from algo.reward.answers import ASK_FOR_ANSWER
from recipes.tiny.task import SHIPPED
from recipes.train_on_file import Config


@pytest.mark.parametrize(
    ("model", "system", "asked"),
    [
        (None, None, ASK_FOR_ANSWER),
        (None, "", None),
        (None, "Be brief.", "Be brief."),
        (SHIPPED, None, None),
        (SHIPPED, "Be brief.", "Be brief."),
    ],
)
def test_a_model_is_asked_for_the_form_that_is_graded(tmp_path, model, system, asked):
    data = tmp_path / "train.jsonl"
    data.write_text('{"question": "6 * 7", "answer": 42}\n')
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text("{}")
    config = Config(model=model or other, data=data, held_out=data, system=system)
    assert config.training().chat.system == asked
