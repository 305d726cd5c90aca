"""What random networks found, each by its smallest network."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from cases import loader
from oracle import covariance, jacobian
from structures import precision_of
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

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


@pytest.mark.parametrize("dims", [1, 2, 3])
@pytest.mark.parametrize("options", [{}, {"affine": True}, {"affine": True, "track_running_stats": True}])
@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_instance_norm_of_one_example_is_that_of_several(dims: int, options: dict[str, bool], structure: str) -> None:
    """torch's backward pass is wrong for one example whose gradient has its channels last, and convolutions in float32
    run so: error bars of one input were up to eight times those of the same input in a batch."""
    torch.manual_seed(0)
    conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
    norm = (nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)[dims - 1]
    first = nn.Sequential(conv(1, 3, 3, padding=1), norm(3, **options), nn.Tanh())
    then = nn.Sequential(conv(3, 2, 3, padding=1), norm(2, **options), nn.Tanh(), nn.Flatten())
    net = nn.Sequential(first, then, nn.Linear(2 * 3**dims, 2))
    x, y = torch.randn(5, 1, *[3] * dims), torch.randn(5, 2)
    la = lw.laplace(net, (x, y), "gaussian", structure=structure)
    several = la.predict(x).f_var
    alone = torch.cat([la.predict(one.unsqueeze(0)).f_var for one in x])
    assert_close(alone, several, rtol=1e-3, atol=1e-4)


def test_instance_norm_behind_a_transpose() -> None:
    """The same in float64, where nothing runs with channels last: the network itself turns the gradient."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.GroupNorm(2, 4), nn.InstanceNorm2d(4, affine=True), nn.Flatten(2), Turn(), nn.Flatten(),
                        nn.Linear(16, 3)).double()  # fmt: skip
    x, y = torch.randn(4, 4, 2, 2).double(), torch.randn(4, 3).double()
    fits = [lw.laplace(net, loader(x, y, size), "gaussian", structure="full") for size in (1, 4)]
    assert_close(precision_of(fits[0]), precision_of(fits[1]), rtol=1e-8, atol=1e-8)


class Turn(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mT


class Scaled(nn.Module):
    """A parameter without dimensions beside a layer that forward mode does not take (an embedding bag)."""

    def __init__(self) -> None:
        super().__init__()
        self.bag, self.scale, self.head = nn.EmbeddingBag(5, 3), nn.Parameter(torch.tensor(0.7)), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.scale * torch.tanh(self.bag(x)))


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # rows are made one by one
@pytest.mark.parametrize("prior", [2.0, "gprior"])
def test_one_vector_that_takes_a_second_route_counts_once(prior: object, tmp_path: Path) -> None:
    """Products of matrix_free with one vector, by a route that fails first, ended in a wrong shape; a parameter without
    dimensions ended in an IndexError; and under a g-prior the file could not be loaded."""
    torch.manual_seed(0)
    net = Scaled().double()
    x, y = torch.randint(5, (6, 4)), torch.randn(6, 2).double()
    structure = lw.curvature.MatrixFree(samples=4, preconditioner="none", tolerance=1e-10)
    la = lw.laplace(net, (x, y), "gaussian", structure=structure, prior=prior)
    _, J = jacobian(net, x)
    flat = J.reshape(12, -1)
    v = torch.randn(1, flat.shape[1]).double()
    precision = la.posterior.precision
    want = v @ (flat.mT @ flat) + v * la.prior.operator().dense()
    assert_close(lw.operators.linalg.mv(precision, v), want, rtol=1e-8, atol=1e-8)
    la.save(tmp_path / "la")
    back = lw.load(tmp_path / "la", net)
    assert_close(back.predict(x).f_var, la.predict(x).f_var, rtol=1e-12, atol=1e-12)


class Recomputed(nn.Module):
    """A body that runs again in the reverse pass, on a copy of its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out = checkpoint(self.body, x.clone(), use_reentrant=False)
        return out[0] if isinstance(out, tuple) else out


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # rows are made one by one
@pytest.mark.parametrize("structure", ["full", "diag", "block"])
@pytest.mark.parametrize("recurrent", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize("options", [{}, {"bidirectional": True, "bias": False}])
def test_a_recurrent_layer_that_runs_again_runs_in_the_same_steps(
    structure: str, recurrent: type[nn.RNNBase], options: dict[str, bool]
) -> None:
    """At sequences of one step its two ways to run keep tensors of the same shapes, and torch does not notice that the
    second run of a checkpoint was the other one: the curvature of its weights was wrong."""
    torch.manual_seed(0)
    net = nn.Sequential(Recomputed(recurrent(3, 2, batch_first=True, **options)), nn.Flatten())
    net.append(nn.Linear(4 if options else 2, 2)).double()
    x, y = torch.randn(5, 1, 3).double(), torch.randn(5, 2).double()
    la = lw.laplace(net, (x, y), "gaussian", structure=structure)
    _, J = jacobian(net, x)
    G = torch.einsum("ncp,ncq->pq", J, J)
    found = precision_of(la) - torch.eye(len(G)).double()
    assert_close(found.diagonal(), G.diagonal(), rtol=1e-8, atol=1e-10)


def test_a_reverse_pass_that_torch_refuses_is_said_in_our_words() -> None:
    net = nn.Sequential(nn.Linear(2, 2), Recomputed(nn.SiLU(inplace=True)), nn.Linear(2, 1)).double()
    with pytest.raises(lw.errors.NetworkFailed, match=r"(?s)a reverse pass through the network failed.*in place"):
        lw.laplace(net, (torch.randn(4, 2).double(), torch.randn(4, 1).double()), "gaussian", structure="kron")


@pytest.mark.filterwarnings("ignore::lapwing.errors.LapwingWarning")  # of what is dropped
@pytest.mark.parametrize("structure", ["full", "kron", "diag", "lowrank"])
def test_a_g_prior_drops_a_layer_whose_curvature_is_rounding(structure: str) -> None:
    """Beside the others it had second moments of 1e-59, and so a prior without bounds: variances were rounding."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    with torch.no_grad():
        net[2].weight.mul_(1e-25)
    x, y = torch.randn(9, 3).double(), torch.randn(9, 2).double()
    la = lw.laplace(net, (x, y), "gaussian", structure=structure, prior="gprior")
    assert structure == "lowrank" or "dropped" in la.coverage["0.weight"]  # whose sketch rounds by more
    assert float(la.predict(x).f_var.max()) < 10
