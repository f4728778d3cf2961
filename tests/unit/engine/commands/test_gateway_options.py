"""The options of `rocstar gateway`, as they become the settings of its replicas."""

import pytest

from engine.commands.gateway import Options, serving_config
from tests.support.paths import TINY


def test_kv_blocks_are_as_given_and_enough_for_eight_conversations_by_default():
    assert serving_config(Options(checkpoint=TINY, max_tokens=100)).replicas_config.kv_blocks == 8 * 4
    assert serving_config(Options(checkpoint=TINY, max_tokens=100, kv_blocks=7)).replicas_config.kv_blocks == 7
    with pytest.raises(ValueError, match="kv_blocks 0"):
        serving_config(Options(checkpoint=TINY, kv_blocks=0))
