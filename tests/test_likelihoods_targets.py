"""Targets that weigh more or less than one, soft and ignored labels, known noise; and targets that are refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    ClassWeighted,
    Gaussian,
    Ignoring,
    KnownNoise,
    LabelSmoothing,
    Likelihood,
    NegativeBinomial,
    Ordinal,
    Pairs,
    Poisson,
    SoftLabels,
    StudentT,
    Weighted,
)

EXACT = ["full", "block", "diag"]  # whose curvature is a sum over rows; Kronecker factors are two sums


def network(outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def inputs(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# -- torch's own losses ----------------------------------------------------------------------------------------------


def test_log_likelihoods_are_those_of_torch_losses() -> None:
    f, y = inputs(12, 4), torch.randint(4, (12,), generator=torch.Generator().manual_seed(1))
    weights = torch.tensor([0.3, 1.0, 2.0, 5.0], dtype=torch.float64)
    holes = torch.where(torch.arange(12) % 3 == 0, -100, y)
    soft = torch.softmax(inputs(12, 4, seed=9), -1)
    for likelihood, targets, loss in [
        (ClassWeighted(Categorical(), weights), y, F.cross_entropy(f, y, weight=weights, reduction="sum")),
        (Ignoring(Categorical()), holes, F.cross_entropy(f, holes, reduction="sum")),
        (
            Ignoring(ClassWeighted(Categorical(), weights)),
            holes,
            F.cross_entropy(f, holes, weight=weights, reduction="sum"),
        ),
        (LabelSmoothing(0.2), y, F.cross_entropy(f, y, label_smoothing=0.2, reduction="sum")),
        (SoftLabels(), soft, F.cross_entropy(f, soft, reduction="sum")),
    ]:
        likelihood.validate(f, targets)
        close(likelihood.log_prob(f, targets).sum(), -loss)
        close(likelihood.log_likelihood(likelihood.statistics(f, targets)), -loss)


# -- a weight is a number of copies ----------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", EXACT)
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_a_whole_weight_is_that_many_copies(structure: str, kind: str) -> None:
    """Curvature, evidence, tangent MAP and the noise that the evidence picks."""
    net, x = network(3), inputs(10, 3)
    times = torch.tensor([0, 1, 2, 3, 1, 0, 2, 1, 1, 4])
    base: Likelihood = Gaussian(0.5) if kind == "gaussian" else Categorical()
    with torch.no_grad():
        y = base.sample(net(x), torch.Generator().manual_seed(0))
    weighted = Weighted(base)
    la = lw.laplace(net, (x, weighted.pack(y, times.double())), weighted, structure=structure)
    copies = lw.laplace(net, (x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)), base, structure=structure)
    close(la.log_evidence(), copies.log_evidence())
    close(la.recentered().log_evidence(), copies.recentered().log_evidence())
    a, b = la.tuned(method="evidence", center="map"), copies.tuned(method="evidence", center="map")
    close(a.log_evidence(), b.log_evidence(), 1e-6)
    close(a.prior.precision, b.prior.precision, 1e-3)
    pred = a.predict(x)
    assert pred.likelihood.name == kind
    close(pred.mean, b.predict(x).mean, 1e-4)
    assert bool(torch.isfinite(pred.log_prob(y)).all())


@pytest.mark.parametrize("structure", [*EXACT, "kron", "ekfac", "lowrank", "matrix_free"])
def test_an_ignored_label_is_a_row_that_is_not_there(structure: str) -> None:
    net, x = network(3), inputs(300, 3)
    y = torch.randint(3, (300,), generator=torch.Generator().manual_seed(1))
    kept = (torch.arange(300) % 4 != 2) & (torch.arange(300) < 256)  # batches with some, and one with none
    la = lw.laplace(net, (x, torch.where(kept, y, -100)), Ignoring(), structure=structure, factor="exact")
    left = lw.laplace(net, (x[kept], y[kept]), "categorical", structure=structure, factor="exact")
    v = inputs(2, la.state.layout.size)
    close(lw.operators.linalg.mv(la.posterior.precision, v), lw.operators.linalg.mv(left.posterior.precision, v), 1e-10)
    close(la.likelihood.log_likelihood(la.state.statistics), left.likelihood.log_likelihood(left.state.statistics))
    close(la.state.statistics["weight"], torch.tensor(float(kept.sum()), dtype=torch.float64))
    assert (la.state.n, left.state.n) == (300, int(kept.sum()))


def test_positions_of_a_sequence_can_be_ignored() -> None:
    """Tokens: outputs (n, q, c), labels (n, q)."""
    net, x = network(3), inputs(5, 4, 3)
    y = torch.randint(3, (5, 4), generator=torch.Generator().manual_seed(1))
    holes = y.clone()
    holes[:, 0], holes[2] = -100, -100
    la = lw.laplace(net, (x, holes), Ignoring(), structure="full", factor="exact")
    kept = holes.reshape(-1) >= 0
    flat = lw.laplace(net, (x.reshape(-1, 3)[kept], y.reshape(-1)[kept]), "categorical", structure="full")
    close(la.log_evidence(), flat.log_evidence())
    close(la.recentered().log_evidence(), flat.recentered().log_evidence())
    pred = la.predict(x)
    found = pred.log_prob(holes)
    assert found.shape == (5, 4)
    assert bool((found[holes < 0] == 0).all())
    close(found.reshape(-1)[kept], flat.predict(x).log_prob(y).reshape(-1)[kept], 1e-6)


def test_outputs_of_ignored_rows_do_not_matter() -> None:
    """Not even where they are far away: a row of weight 0 adds exact zeros."""
    likelihood, y = Ignoring(), torch.tensor([-100, 1])
    near, far = (torch.tensor([[a, 0.0], [0.3, 0.1]], dtype=torch.float64) for a in (0.0, 1e30))
    for f in (near, far):
        close(likelihood.log_prob(f, y)[0], torch.zeros((), dtype=torch.float64))
        assert not bool(likelihood.curvature_root(f, y)[0].any())
        assert not bool(likelihood.score(f, y)[0].any())
    close(likelihood.statistics(near, y)["log_lik"], likelihood.statistics(far, y)["log_lik"])


def test_every_target_ignored_is_an_error() -> None:
    net, x = network(2), inputs(6, 3)
    with pytest.raises(InvalidValue, match="every target is ignored"):
        lw.laplace(net, (x, torch.full((6,), -100)), Ignoring())
    weighted = Weighted(Gaussian())
    with pytest.raises(InvalidValue, match="weight 0"):
        lw.laplace(net, (x, weighted.pack(inputs(6, 2), torch.zeros(6))), weighted)


# -- known noise -----------------------------------------------------------------------------------------------------


def test_known_noise_is_bayesian_linear_regression() -> None:
    """Identity 1: evidence = log N(y; 0, diag σ² + J A⁻¹ Jᵀ), and the predictive covariance in closed form."""
    torch.manual_seed(0)
    net = nn.Linear(4, 2, bias=False).double()
    nn.init.zeros_(net.weight)
    x, y, noise = inputs(15, 4), inputs(15, 2, seed=2), 0.2 + inputs(15, 2, seed=3).abs()
    la = lw.laplace(net, (x, KnownNoise.pack(y, noise)), KnownNoise(), structure="full", prior=0.6).recentered()
    J = torch.einsum("ni,co->ncoi", x, torch.eye(2, dtype=torch.float64)).reshape(30, 8)
    cov = torch.diag(noise.reshape(-1) ** 2) + J @ J.mT / 0.6
    normal = torch.distributions.MultivariateNormal(torch.zeros(30, dtype=torch.float64), cov)
    close(la.log_evidence(), normal.log_prob(y.reshape(-1)))
    posterior = torch.linalg.inv(J.mT @ torch.diag(noise.reshape(-1) ** -2) @ J + 0.6 * torch.eye(8).double())
    pred = la.predict(x, mean="tangent")
    rows = J.reshape(15, 2, 8)
    close(pred.covariance, rows @ posterior @ rows.mT)
    close(pred.f_mean, (rows @ (posterior @ (J.mT @ (y / noise**2).reshape(-1)))))
    with pytest.raises(Unsupported, match="noise at new inputs is not known"):
        _ = pred.aleatoric


def test_equal_known_noise_is_a_gaussian() -> None:
    net, x, y = network(2), inputs(9, 3), inputs(9, 2, seed=4)
    a = lw.laplace(
        net, (x, KnownNoise.pack(y, torch.full((9,), 0.4, dtype=torch.float64))), KnownNoise(), structure="kron"
    )
    b = lw.laplace(net, (x, y), Gaussian(0.4), structure="kron")
    close(a.log_evidence(), b.log_evidence())
    close(a.tuned().prior.precision, b.tuned(fixed=("noise",)).prior.precision, 5e-3)  # to the tolerance of a tuning


# -- preferences -----------------------------------------------------------------------------------------------------


def test_a_reward_model_learns_from_pairs() -> None:
    """Pairs: a reward that is known up to a common shift, whose direction has no curvature."""
    torch.manual_seed(0)
    reward = nn.Linear(3, 1).double()
    net, x = Pairs(reward), inputs(40, 2, 3)
    y = (net(x)[:, 1] > net(x)[:, 0]).long()
    la = lw.laplace(net, (x, y), "bradley_terry", structure="full", prior=0.3)
    p = torch.sigmoid(net(x)[:, 0] - net(x)[:, 1]).detach()
    gap = torch.cat([x[:, 0] - x[:, 1], torch.zeros(40, 1, dtype=torch.float64)], -1)  # ∂(f_0 − f_1); none in the bias
    expected = torch.einsum("n,na,nb->ab", p * (1 - p), gap, gap) + 0.3 * torch.eye(4, dtype=torch.float64)
    close(lw.operators.linalg.to_dense(la.posterior.precision), expected)
    assert la.predict(x).mean.shape == (40, 2)
    with pytest.raises(InvalidValue, match="two items"):
        net(x[:, 0])
    with pytest.raises(InvalidValue, match=r"likelihoods\.Pairs"):
        lw.laplace(nn.Linear(3, 1).double(), (x[:, 0], y), "bradley_terry")


# -- settings --------------------------------------------------------------------------------------------------------


def test_another_setting_is_another_fit() -> None:
    net, x = network(1), inputs(20, 3)
    y = torch.poisson(torch.full((20, 1), 2.0, dtype=torch.float64), generator=torch.Generator().manual_seed(0))
    la = lw.laplace(net, (x, y), NegativeBinomial(3.0), structure="kron")
    assert la.likelihood.hyperparameters == {}
    with pytest.raises(InvalidValue, match="fit again"):
        la.replace(likelihood=NegativeBinomial(4.0))
    other = lw.laplace(net, (x, y), NegativeBinomial(30.0), structure="kron")
    poisson = lw.laplace(net, (x, y), "poisson", structure="kron")
    wide = lw.laplace(net, (x, y), NegativeBinomial(1e7), structure="kron")
    close(wide.log_evidence(), poisson.log_evidence(), 1e-5)  # Poisson is its limit
    assert float(other.log_evidence()) != float(la.log_evidence())


# -- what is refused -------------------------------------------------------------------------------------------------

F1, F2 = torch.zeros(4, 1, dtype=torch.float64), torch.zeros(4, 2, dtype=torch.float64)
ONES = torch.ones(4, dtype=torch.float64)
REFUSED: list[tuple[Likelihood, Tensor, Tensor, str]] = [
    (Poisson(), F2, -torch.ones(4, 2), "counts"),
    (Poisson(), F2, torch.full((4, 2), 0.5), "counts"),
    (Poisson(), F2, torch.full((4, 2), math.inf), "counts"),
    (Poisson(), F2, torch.full((4, 2), math.nan), "counts"),
    (Poisson(), F2, torch.ones(4), "do not match"),
    (NegativeBinomial(2.0), F2, -torch.ones(4, 2), "counts"),
    (NegativeBinomial(torch.ones(3)), F2, torch.ones(4, 2), "3 values for 2 outputs"),
    (StudentT(), F2, torch.ones(4, 2).long(), "floating point"),
    (StudentT(torch.ones(3)), F2, torch.ones(4, 2), "scale has 3 values"),
    (StudentT(), F2, torch.full((4, 2), math.nan), "NaN"),
    (Ordinal((0.0, 1.0)), F2, torch.zeros(4).long(), "one output"),
    (Ordinal((0.0, 1.0)), F1, torch.full((4,), 3), r"outside 0\.\.2"),
    (Ordinal((0.0, 1.0)), F1, torch.zeros(4), "integer class labels"),
    (BradleyTerry(), F1, torch.zeros(4).long(), "two items"),
    (BradleyTerry(), F2, torch.full((4,), 2), r"outside 0\.\.1"),
    (SoftLabels(), F2, torch.full((4, 2), 0.4), "adds up to 1"),
    (SoftLabels(), F2, torch.tensor([[1.5, -0.5]] * 4), "not negative"),
    (SoftLabels(), F2, torch.zeros(4).long(), "probabilities"),
    (SoftLabels(), F1, torch.ones(4, 1), "at least 2 outputs"),
    (Categorical(), F1, torch.zeros(4).long(), "at least 2 outputs"),
    (ClassWeighted(Categorical(), (1.0, 2.0, 3.0)), F2, torch.zeros(4).long(), "3 class weights for 2"),
    (Ignoring(), F2, torch.full((4,), 7), r"outside 0\.\.1"),
    (Weighted(Categorical()), F2, torch.zeros(4).long(), r"weighted\.pack"),
    (Weighted(Categorical()), F2, torch.stack([0.5 * ONES, ONES], -1), "whole numbers"),
    (Weighted(Categorical()), F2, torch.stack([ONES, -ONES], -1), "not negative"),
    (Weighted(Gaussian()), F2, torch.ones(4, 2), "do not match"),
    (KnownNoise(), F2, torch.ones(4, 2), r"KnownNoise\.pack"),
    (KnownNoise(), F2, torch.cat([torch.ones(4, 2), torch.zeros(4, 2)], -1), "noise must be positive"),
    (Bernoulli(), F2, torch.full((4, 2), 0.3), "0 or 1"),
]


@pytest.mark.parametrize(("likelihood", "f", "y", "text"), REFUSED)
def test_targets_that_cannot_be_are_refused(likelihood: Likelihood, f: Tensor, y: Tensor, text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        likelihood.validate(f, y)


MISMADE: list[tuple[Any, tuple[Any, ...], str]] = [
    (NegativeBinomial, (0.0,), "dispersion must be positive"),
    (StudentT, (0.0,), "scale must be positive"),
    (StudentT, (1.0, -1.0), "df must be positive"),
    (Ordinal, ((1.0, 0.0),), "cutpoints"),
    (Ordinal, ((),), "cutpoints"),
    (Ordinal, ((0.0, math.inf),), "cutpoints"),
    (LabelSmoothing, (1.0,), "between 0 and 1"),
    (LabelSmoothing, (0.0,), "positive"),
    (Weighted, ("gaussian",), "a likelihood object"),
    (Ignoring, (Gaussian(),), "for labels"),
    (Ignoring, (Categorical(), 0.5), "whole number"),
    (ClassWeighted, (Gaussian(), (1.0, 1.0)), "for labels"),
    (ClassWeighted, (Categorical(), (1.0, 0.0)), "weights must be positive"),
]


@pytest.mark.parametrize(("kind", "arguments", "text"), MISMADE)
def test_settings_that_cannot_be_are_refused(kind: Any, arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(InvalidValue, match=text):
        kind(*arguments)


def test_weights_that_do_not_fit_are_refused() -> None:
    with pytest.raises(InvalidValue, match="one weight for each row"):
        Weighted(Gaussian()).pack(torch.ones(4, 2), torch.ones(4, 2))
    with pytest.raises(InvalidValue, match="not negative"):
        Weighted(Categorical()).pack(torch.zeros(4).long(), torch.tensor([1.0, -1.0, 1.0, 1.0]))
    with pytest.raises(InvalidValue, match="one a row, or one each"):
        KnownNoise.pack(torch.ones(4, 2), torch.ones(3))


def test_evidences_of_the_same_targets_compare_whatever_the_noise() -> None:
    """Degrees of freedom are no hyperparameter that a search moves: fits of several are compared by their evidences."""
    net, x = network(2), inputs(200, 3)
    with torch.no_grad():
        y = StudentT(0.3, 2.5).sample(net(x), torch.Generator().manual_seed(0))
    fits: dict[str, Likelihood] = {
        "light": StudentT(0.3, 50.0),
        "heavy": StudentT(0.3, 2.5),
        "normal": Gaussian(0.3),
    }
    found = {name: lw.laplace(net, (x, y), likelihood, structure="kron") for name, likelihood in fits.items()}
    evidences = {name: float(la.log_evidence()) for name, la in found.items()}
    assert lw.compare(found).best.name == "heavy" == max(evidences, key=lambda name: evidences[name])
    labels = torch.randint(2, (200,))
    for other in (LabelSmoothing(0.3), Ignoring(), ClassWeighted(Categorical(), (1.0, 3.0))):
        fits = {"plain": Categorical(), "other": other}
        with pytest.raises(InvalidValue, match="different likelihoods"):
            lw.compare({name: lw.laplace(net, (x, labels), likelihood) for name, likelihood in fits.items()})


@pytest.mark.parametrize("shape", [(5,), (2, 5), (3, 2, 5)])
def test_smoothed_labels_at_any_positions_are_smoothed_once(shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    f = torch.randn((*shape, 4), generator=generator, dtype=torch.float64)
    y = torch.randint(4, shape, generator=generator)
    expected = [
        -torch.nn.functional.cross_entropy(row, label, label_smoothing=0.2)
        for row, label in zip(f.reshape(-1, 4), y.reshape(-1), strict=True)
    ]
    found = lw.likelihoods.LabelSmoothing(0.2).log_prob(f, y)
    torch.testing.assert_close(found, torch.stack(expected).reshape(shape))
