"""Published weights go from host memory through a buffer of a GPU's memory, here of the CPU's."""

import torch

from algo.weights.layout import staged


def test_memory_leaves_whole_and_in_order_through_a_buffer_that_is_smaller():
    memory, buffer = torch.arange(250, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8)
    sent = []
    for piece in staged(memory, buffer):
        assert piece.untyped_storage()._cdata == buffer.untyped_storage()._cdata
        sent.append(piece.clone())
    assert [len(piece) for piece in sent] == [64, 64, 64, 58]
    assert torch.equal(torch.cat(sent), memory)


def test_a_small_weight_is_one_piece():
    [piece] = staged(torch.ones(3, dtype=torch.uint8), torch.empty(64, dtype=torch.uint8))
    assert piece.tolist() == [1, 1, 1]
