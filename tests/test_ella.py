"""ELLA: exact on the span of its anchors, below elsewhere, against the dense formula."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import close, draw

SEEDS = range(3)
EVERY = 10_000  # anchors: all rows


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()  # p = 57
    if kind == "images":
        net = nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
        return net, draw(9, 2, 5, 6), torch.randint(2, (9, 2)), lw.likelihoods.Bernoulli()
    if kind == "sequences":
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return net, draw(4, 3, 3), torch.randint(2, (4, 3)), lw.likelihoods.Categorical()
    if kind == "classes":
        return net, draw(7, 5), torch.randint(3, (7,)), lw.likelihoods.Categorical()
    noise = torch.tensor([0.3, 0.8, 0.5]) if kind == "per output" else torch.tensor(0.4)
    return net, draw(7, 5), draw(7, 3), lw.likelihoods.Gaussian(noise.double())


def root(likelihood: lw.likelihoods.Likelihood, f: Tensor) -> Tensor:
    """Λ (m, c, c) at outputs f (m, c)."""
    if isinstance(likelihood, lw.likelihoods.Categorical):
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    if isinstance(likelihood, lw.likelihoods.Bernoulli):
        return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()))
    return torch.diag_embed(torch.ones_like(f) / likelihood.noise**2)


KINDS = ("classes", "gaussian", "per output", "images", "sequences")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
@pytest.mark.parametrize("seed", SEEDS)
def test_all_rows_and_full_rank_are_exact_on_the_training_span(kind: str, prior: object, seed: int) -> None:
    """Identity 14."""
    model, x, y, likelihood = problem(kind, seed)
    prior = lw.priors.Gaussian(0.7, per="layer") if prior == "layerwise" else prior
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=prior)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=EVERY, prior=prior)
    close(found.predict(x).covariance, full.predict(x).covariance)
    close(found.predict(x).f_mean, full.predict(x).f_mean)
    close(found.predict(x).mean, full.predict(x).mean)
    if kind != "sequences":
        close(found.predict(x, joint=True).covariance, full.predict(x, joint=True).covariance)
    assert abs(found.share - 1) < 1e-10


@pytest.mark.parametrize("seed", SEEDS)
def test_off_the_span_only_the_prior_s_part_is_missing(seed: int, jacobian) -> None:
    """full − ELLA = J (A⁻¹ − VᵀV) Jᵀ: the prior covariance outside the anchors' span."""
    model, x, y, likelihood = problem("classes", seed)
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=0.7)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=EVERY, prior=0.7)
    new = draw(4, 5)
    J, v = jacobian(model, lambda twin: twin(new)), found.directions
    missing = J @ (torch.eye(57, dtype=torch.float64) / 0.7 - v.mT @ v) @ J.mT
    assert float(missing.diagonal(dim1=1, dim2=2).min()) > 1e-4
    close(full.predict(new).covariance - found.predict(new).covariance, missing)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("anchors", "rank"), [(6, 4), (5, 5), (EVERY, 3)])
def test_the_dense_formula(kind: str, anchors: int, rank: int, jacobian) -> None:
    """From the Jacobian by autograd, with the rows that the generator draws."""
    model, x, y, likelihood = problem(kind)
    found = lw.gp.ella(
        model, (x, y), likelihood, anchors=anchors, rank=rank, prior=0.7, generator=torch.Generator().manual_seed(4)
    )
    J = jacobian(model, lambda twin: twin(x))  # (n, ..., c, p)
    rows, p = J.reshape(-1, J.shape[-1]), J.shape[-1]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(4))[:anchors].sort().values
    values, q = torch.linalg.eigh(rows[chosen] @ rows[chosen].mT / 0.7)
    v = (q[:, -rank:] / values[-rank:].sqrt()).mT @ rows[chosen] / 0.7
    psi = J.reshape(-1, J.shape[-2], p) @ v.mT  # (m, c, k)
    f = model(x).detach()
    middle = root(likelihood, f.reshape(-1, f.shape[-1]))
    g = torch.einsum("mak,mab,mbl->kl", psi, middle, psi) + torch.eye(rank)
    new = x.roll(1, -1)
    fresh = jacobian(model, lambda twin: twin(new)) @ v.mT
    close(found.predict(new).covariance, fresh @ torch.linalg.solve(g, fresh.mT))
    close(found.directions.mT @ found.directions, v.mT @ v)
    assert abs(found.share - float(values[-rank:].sum() / values.sum())) < 1e-10
    assert found.anchors == min(anchors, len(rows))


def test_more_rank_never_narrows_the_prior_part(jacobian) -> None:
    """ψψᵀ, the prior's variance in the span, grows with the rank."""
    model, x, y, likelihood = problem("classes")
    traces = []
    for rank in (1, 3, 8, 14):
        v = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=rank).directions
        traces.append(float((jacobian(model, lambda twin: twin(x)) @ v.mT).square().sum()))
    assert traces == sorted(traces)


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
def test_another_prior_or_noise_needs_no_pass(kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    other = lw.likelihoods.Gaussian(2 * likelihood.noise)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5, prior=0.7).replace(prior=3.0, likelihood=other)
    fresh = lw.gp.ella(model, (x, y), other, anchors=9, rank=5, prior=3.0)
    new = draw(3, 5)
    close(found.predict(new).covariance, fresh.predict(new).covariance)
    close(found.predict(new).total, fresh.predict(new).total)
    with pytest.raises(lw.errors.InvalidValue, match="this prior times any number"):
        found.replace(prior={"0.*": 1.0, "2.*": 2.0})
    with pytest.raises(lw.errors.InvalidValue, match="cannot serve"):
        found.replace(likelihood="categorical")


def test_batches_change_nothing() -> None:
    model, x, y, likelihood = problem("classes")
    options = {"anchors": 9, "rank": 5}
    whole = lw.gp.ella(model, (x, y), likelihood, **options)
    cut = lw.gp.ella(model, DataLoader(TensorDataset(x, y), batch_size=2), likelihood, memory_budget=2**16, **options)
    close(whole.predict(x).covariance, cut.predict(x).covariance)


def test_a_prediction_like_any_other() -> None:
    model, x, y, _ = problem("classes")
    found = lw.gp.ella(model, (x, y), "categorical", anchors=9, rank=5, subset="last_layer")
    pred = found(x)
    assert isinstance(pred, lw.Prediction)
    close(pred.total, pred.epistemic + pred.aleatoric)
    close(found.predict(x, link="probit").mean.sum(-1), torch.ones(7, dtype=torch.float64))
    assert pred.log_prob(y).shape == (7,)
    assert repr(found).startswith("Ella(categorical; rank 5 with ")
    assert "9 anchors; 21 parameters, 7 examples" in repr(found)


def test_the_network_and_the_random_state_stay_as_they_were() -> None:
    model, x, y, likelihood = problem("images")
    model.train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    lw.gp.ella(model, (x, y), likelihood, anchors=6, rank=4).predict(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


class Shrinking:
    """A loader that loses examples after its first passes."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.passes = x, y, 0

    def __iter__(self):
        self.passes += 1
        cut = len(self.x) if self.passes < 5 else 3
        yield self.x[:cut], self.y[:cut]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (lw.errors.InvalidValue, "anchors.*at least 1", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, anchors=0)),
        (lw.errors.InvalidValue, "rank.*at least 1", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, rank=0)),
        (lw.errors.Unsupported, "gprior", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, prior="gprior")),
        (lw.errors.InvalidValue, "labels|classes|below", lambda m, x, y, k: lw.gp.ella(m, (x, y + 5), k)),
        (lw.errors.InvalidValue, "NaN", lambda m, x, y, k: lw.gp.ella(m, (x / 0 * 0, y), k)),
        (lw.errors.InvalidValue, "NaN", lambda m, x, y, k: lw.gp.ella(m, (x, y), k).predict(x / 0 * 0)),
        (lw.errors.InvalidValue, "nn.Module", lambda m, x, y, k: lw.gp.ella(lambda x: x, (x, y), k)),
        (lw.errors.InvalidValue, "no example", lambda m, x, y, k: lw.gp.ella(m, (x, y), k).predict(x[:0])),
        (lw.errors.InvalidValue, "in another", lambda m, x, y, k: lw.gp.ella(m, Shrinking(x, y), k)),
    ],
)
def test_what_cannot_be_done_is_said(error: type[Exception], match: str, call) -> None:
    model, x, y, likelihood = problem("classes")
    with pytest.raises(error, match=match):
        call(model, x, y, likelihood)
