"""What random networks found, each by its smallest network."""

from __future__ import annotations

import pytest
import torch
from oracle import covariance, jacobian
from structures import precision_of
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw


class Halves(nn.Module):
    """A bilinear layer, which runs in steps, and behind it a linear one that sees some of the examples only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.some, self.head = nn.Bilinear(2, 2, 3), nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x, x.sin())
        chosen = (x[:, 0] > 0).nonzero().squeeze(-1)
        return self.head(h.index_add(0, chosen, self.some(h[chosen])))


@pytest.mark.parametrize("structure", ["full", "kron", "lowrank"])
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # rows are made one by one
def test_layers_in_steps_beside_a_layer_of_some_examples(structure: str) -> None:
    """It ended in torch's 'shape is invalid': the linear layer's rows were read before its rule was proved."""
    torch.manual_seed(0)
    net = Halves().double()
    x = torch.tensor([[1.0, 0.5], [-1.0, 0.3], [0.5, -1.0], [2.0, 0.1], [-0.2, 1.0]]).double()
    la = lw.laplace(net, [(x, torch.randn(5, 2).double())], "gaussian", structure=structure)
    assert "Bilinear rule" in la.coverage["first.weight"] or structure != "kron"
    _, J = jacobian(net, x)
    precision = precision_of(la)
    if structure != "kron":
        flat = J.reshape(10, -1)
        assert_close(precision, flat.mT @ flat + torch.eye(len(precision)).double(), rtol=1e-8, atol=1e-8)
    assert_close(la.predict(x).covariance, covariance(J, precision, False), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("noise", [1.0, torch.tensor([0.5, 1.0, 2.0])])
@pytest.mark.parametrize("per", ["all", "layer", "unit"])
@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # that a bound was met
def test_tuning_without_any_curvature_stays_finite(form: str, per: str, noise: object) -> None:
    """A network whose outputs are constant: precisions near 1e-150 overflowed to NaN in the search."""
    net = nn.Sequential(nn.LayerNorm(1, elementwise_affine=False), nn.Linear(1, 3, bias=False)).double()
    x, y = torch.randn(6, 1).double(), torch.randn(6, 3).double()
    prior, structure = lw.priors.Gaussian(1.3, per=per), lw.curvature.Full(form)
    la = lw.laplace(net, (x, y), lw.likelihoods.Gaussian(noise), structure=structure, prior=prior)
    best = la.tuned(center="map")
    assert float(best.log_evidence()) >= float(la.log_evidence())
    assert 1e-9 < float(best.prior.precision.min()) < 1.3


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # that a bound was met
def test_tuning_a_covariance_from_one_example_does_not_lower_the_evidence(weighted: bool) -> None:
    """One example says nothing of most directions of R: the search began, and ended, at an evidence of −6e10."""
    torch.manual_seed(1)
    net = nn.Linear(2, 3).double()
    x, y = torch.randn(1, 2).double(), torch.randn(1, 3).double()
    R = torch.tensor([[1.2, 0.5, -0.9], [0.5, 0.6, -0.7], [-0.9, -0.7, 3.0]]).double()
    likelihood = lw.likelihoods.CorrelatedGaussian(R)
    if weighted:
        likelihood = lw.likelihoods.Weighted(likelihood)
        y = likelihood.pack(y, torch.ones(1).double())
    la = lw.laplace(net, (x, y), likelihood)
    assert float(la.tuned(center="map").log_evidence()) >= float(la.log_evidence()) - 1e-6
