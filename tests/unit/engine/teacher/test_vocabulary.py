"""Teacher and student may differ in size, not in what their token ids mean."""

import json
import shutil

import pytest

from engine.teacher.config import TeacherConfig
from engine.teacher.vocabulary import check_same_vocabulary
from tests.support.paths import TINY


def copied(folder, *, tokenizer=lambda form: form, **changes):
    """The tiny agent's folder without weights, with another tokenizer or other fields of config.json."""
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(TINY / name, folder / name)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    form = json.loads((folder / "tokenizer.json").read_text())
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer(form)))
    return folder


def swapped(form):
    vocabulary = form["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[300:302]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    return form


def another_special(form):
    form["added_tokens"][-1]["content"] = "<|other|>"
    return form


def test_another_size_and_rows_that_only_pad_are_no_difference(tmp_path):
    check_same_vocabulary(TINY, copied(tmp_path / "big", hidden_size=256, vocab_size=640))


@pytest.mark.parametrize("change", [swapped, another_special])
def test_another_meaning_of_an_id_is_refused_with_the_ids(tmp_path, change):
    teacher = copied(tmp_path / "other", tokenizer=change)
    with pytest.raises(ValueError, match=r"another vocabulary.* differ: \d+ is '"):
        TeacherConfig(teacher=str(teacher)).check_student(TINY, max_tokens=230)


def test_too_few_rows_are_refused(tmp_path):
    with pytest.raises(ValueError, match="has 100 rows"):
        check_same_vocabulary(TINY, copied(tmp_path / "small", vocab_size=100))


def test_a_folder_without_a_tokenizer_is_refused_with_a_fix(tmp_path):
    teacher = copied(tmp_path / "bare")
    (teacher / "tokenizer.json").unlink()
    with pytest.raises(ValueError, match=r"no tokenizer\.json.*Fix:"):
        check_same_vocabulary(TINY, teacher)
    (teacher / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        check_same_vocabulary(TINY, teacher)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"teacher": ""}, "teacher must be a checkpoint's folder"),
        ({"teacher": "/nowhere"}, "no config.json in '/nowhere'"),
        ({"teacher": "http://x/v1", "devices": (0,)}, "devices"),
        ({"teacher": "http://x/v1", "top": 21}, "top must be from 0 to 20"),
        ({"teacher": "http://x/v1", "deadline_s": 0}, "deadline_s"),
    ],
)
def test_a_teacher_that_cannot_be_is_refused_by_name(fields, said):
    with pytest.raises(ValueError, match=said):
        TeacherConfig(**fields)


def test_a_teacher_that_reads_less_than_a_trajectory_is_refused_before_anything_starts(tmp_path):
    short = TeacherConfig(teacher=str(copied(tmp_path / "short", max_position_embeddings=256)))
    short.check_student(TINY, max_tokens=224)
    with pytest.raises(ValueError, match=r"can read 256 tokens.*Fix: rollout\.max_tokens=224"):
        short.check_student(TINY, max_tokens=230)
    scaled = copied(
        tmp_path / "scaled", max_position_embeddings=128, rope_parameters={"rope_type": "yarn", "factor": 4.0}
    )
    TeacherConfig(teacher=str(scaled)).check_student(TINY, max_tokens=230)


def test_a_teacher_whose_tied_head_vllm_would_leave_unfilled_is_refused(tmp_path):
    tied = copied(tmp_path / "tied", model_type="glm4_moe", tie_word_embeddings=True)
    with pytest.raises(ValueError, match="teacher: tie_word_embeddings must be false for 'glm4_moe'"):
        TeacherConfig(teacher=str(tied)).check_student(TINY, max_tokens=224)


def test_the_folder_of_a_run_is_refused_with_its_checkpoint(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    copied(tmp_path / "checkpoint")
    with pytest.raises(ValueError, match=f"Fix: teacher={tmp_path / 'checkpoint'}"):
        TeacherConfig(teacher=str(tmp_path))
