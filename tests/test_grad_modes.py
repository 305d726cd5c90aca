"""The user's grad mode, inference mode included, does not change an answer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import pytest
import torch
from torch import nn

import lapwing as lw

MODES = {"no_grad": torch.no_grad, "inference_mode": torch.inference_mode, "enable_grad": torch.enable_grad}
STRUCTURES = {"primal": lw.curvature.Full("primal"), "dual": lw.curvature.Full("dual"), "kron": "kron", "diag": "diag"}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("mode", MODES)
def test_fit_tune_and_predict_are_the_same_under_every_grad_mode(mode: str, structure: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double().eval()
    x, y = torch.randn(9, 3).double(), torch.randint(0, 2, (9,))
    expected = lw.laplace(model, (x, y), "categorical", structure=STRUCTURES[structure]).tuned()
    context: AbstractContextManager = MODES[mode]()
    with context:
        found = lw.laplace(model, (x.clone(), y), "categorical", structure=STRUCTURES[structure]).tuned()
        prediction = found.predict(x[:3].clone())
        late = expected.predict(x[:3].clone())
        evidence = found.log_evidence()
    torch.testing.assert_close(found.prior.precision, expected.prior.precision)
    torch.testing.assert_close(evidence, expected.log_evidence())
    for got in (prediction, late):
        torch.testing.assert_close(got.covariance, expected.predict(x[:3]).covariance)
        torch.testing.assert_close(got.probs, expected.predict(x[:3]).probs)
