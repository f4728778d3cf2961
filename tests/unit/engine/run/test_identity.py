"""Whether a run is the same one: by the options that decide its result, as a file gives them back."""

import json
from pathlib import Path

from engine.run.identity import Identity, describe

OPTIONS = {"seed": 0, "steps": 8, "steps_warm": 1, "record.newest": 4, "runs": Path("runs"), "devices": (0, 1)}


def test_what_was_written_is_the_same_run_and_what_it_holds_besides_does_not_matter():
    identity = Identity(OPTIONS)
    there = json.loads(json.dumps({**identity.values, "argv": ["x"]}))
    assert not identity.differences(there)
    assert identity == Identity(there | {"argv": None}, free=("argv",))


def test_each_difference_has_both_values_and_a_missing_name_is_one():
    identity = Identity(OPTIONS)
    there = {**identity.values, "seed": 1}
    del there["devices"]
    assert identity.differences(there) == {"seed": (1, 0), "devices": (None, [0, 1])}
    assert set(identity.differences({})) == set(OPTIONS)


def test_free_options_are_named_whole_or_by_what_they_are_a_part_of():
    identity = Identity(OPTIONS, free=("steps", "record."))
    assert identity == Identity(OPTIONS | {"steps": 9, "record.newest": 5}, free=("steps", "record."))
    assert identity.differences({**identity.values, "steps_warm": 2}) == {"steps_warm": (2, 1)}


def test_a_long_value_is_cut_in_a_message():
    message = describe({"data": (["file"] * 1000, None)})
    assert message.startswith("data (['file', ")
    assert len(message) < 120
