"""What a teacher teaches, against tinker-cookbook and TRL."""

import numpy as np
import pytest
import torch

from algo.distill import token_advantages
from algo.loss.distillation import divergence
from tests.support.golden import expected, over, rows, tensor

UNCLIPPED = 1e9  # the peer does not clip


@over(rows("distillation", peer="tinker-cookbook"))
def test_advantages_match_golden(row):
    inputs, outputs = row["inputs"], expected(row)
    sampler, teacher, mask = (np.asarray(inputs[name]) for name in ("log_prob", "teacher_log_prob", "mask"))
    ours = token_advantages(teacher.astype(np.float32), sampler.astype(np.float32), mask > 0, clip=UNCLIPPED)
    np.testing.assert_allclose(row["params"]["coef"] * ours, outputs["advantages"], rtol=1e-5, atol=1e-5)
    assert -ours.sum() / mask.sum() == pytest.approx(outputs["teacher_kl"], rel=1e-5)


@over(rows("distillation", peer="TRL"))
def test_divergences_match_golden_in_value_and_gradient(row):
    student = tensor(row["inputs"]["log_prob"]).requires_grad_()
    ours = divergence(student, tensor(row["inputs"]["teacher_log_prob"]), row["params"]["definition"])
    ours.sum().backward()
    outputs, tolerance = expected(row), row["params"]["tol"]
    torch.testing.assert_close(ours.detach(), tensor(outputs["kl"]), rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(student.grad, tensor(outputs["grad_log_prob"]), rtol=tolerance, atol=tolerance)
