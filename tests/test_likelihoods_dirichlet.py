"""Labels as Gaussian observations of the logits: against dense regression with known noise, in plain torch."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.func import functional_call, jacrev
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingError
from lapwing.likelihoods import (
    Bernoulli,
    Categorical,
    ClassWeighted,
    Dirichlet,
    DirichletBernoulli,
    Ignoring,
    KnownNoise,
    Likelihood,
    LogRatio,
    Weighted,
)
from lapwing.predictive.own_data import training_nll
from lapwing.predictive.prediction import Prediction

SEEDS = (0, 1, 2)
STRUCTURES = ["full", "kron", "ekfac", "block", "diag", "lowrank", "matrix_free"]
LAMBDA = 0.6


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-8) -> None:
    assert_close(actual, expected, rtol=tolerance, atol=tolerance)


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def inputs(*shape: int, seed: int = 5) -> Tensor:
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


def network(outputs: int, seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def labels(n: int, classes: int, seed: int = 0) -> Tensor:
    return torch.randint(classes, (n,), generator=seeded(seed))


def gamma(alpha: Tensor) -> tuple[Tensor, Tensor]:
    variance = torch.log(1 + 1 / alpha)
    return torch.log(alpha) - variance / 2, variance


def observed(t: Tensor, epsilon: float, binary: bool = False) -> tuple[Tensor, Tensor]:
    """ỹ and σ² of probabilities t (n, c), or of binary outputs t."""
    one, its = gamma(epsilon + t)
    if not binary:
        return one, its
    zero, other = gamma(epsilon + 1 - t)
    return one - zero, its + other


def sure_network() -> tuple[nn.Module, Tensor, Tensor]:
    """A network that fits its data to the last label."""
    x, y = inputs(90, 2), torch.arange(90) % 3
    x = x + torch.tensor([[4.0, 0.0], [-4.0, 2.0], [0.0, -4.0]], dtype=torch.float64)[y]
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    optimizer = torch.optim.Adam(net.parameters(), lr=0.02)
    for _ in range(300):
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()
    return net, x, y


class Dense:
    """y ~ N(f(θ) + J(v − θ), D), v ~ N(0, 1/λ), written out."""

    def __init__(self, net: nn.Module, x: Tensor, y: Tensor, variance: Tensor) -> None:
        params = {k: v.detach() for k, v in net.named_parameters()}
        self.theta = torch.cat([v.reshape(-1) for v in params.values()])
        self.f = net(x).detach().reshape(-1)
        jac = jacrev(lambda p: functional_call(net, p, (x,)))(params)
        self.J = torch.cat([jac[k].reshape(len(self.f), -1) for k in params], -1)
        self.y, self.D = y.reshape(-1), variance.reshape(-1)

    def log_evidence(self, precision: float) -> Tensor:
        cov = torch.diag(self.D) + self.J @ self.J.mT / precision
        return distributions.MultivariateNormal(self.f - self.J @ self.theta, cov).log_prob(self.y)

    def posterior(self, precision: float) -> tuple[Tensor, Tensor]:
        """v* and the covariance of the weights."""
        H = self.J.mT @ (self.J / self.D[:, None]) + precision * torch.eye(len(self.theta), dtype=torch.float64)
        r = self.y - self.f + self.J @ self.theta
        return torch.linalg.solve(H, self.J.mT @ (r / self.D)), torch.linalg.inv(H)

    def covariance(self, precision: float, c: int) -> Tensor:
        rows = self.J.reshape(-1, c, len(self.theta))
        return rows @ self.posterior(precision)[1] @ rows.mT


def one_hot(y: Tensor, classes: int) -> Tensor:
    return nn.functional.one_hot(y, classes).double()


def soften(y: Tensor, classes: int, seed: int = 3) -> Tensor:
    return 0.7 * one_hot(y, classes) + 0.3 * torch.softmax(inputs(len(y), classes, seed=seed), -1)


def check_dense(la: Any, dense: Dense, x: Tensor, c: int) -> None:
    """Evidence at v* with its constants, v* itself, the covariance of outputs, and the evidence at the weights."""
    precision = float(la.prior.precision)
    v, _ = dense.posterior(precision)
    moved = la.recentered()
    close(moved.log_evidence(), dense.log_evidence(precision))
    close(moved.tangent_map.vector, v, 1e-7)
    close(la.predict(x).covariance, dense.covariance(precision, c))
    close(moved.predict(x, mean="tangent").f_mean.reshape(-1), dense.f + dense.J @ (v - dense.theta), 1e-7)


# -- the observations ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epsilon", [0.003, 0.1, 2.0])
def test_an_observation_has_the_mean_and_variance_of_the_gamma(epsilon: float) -> None:
    """Identity 21: E[eᶻ] = Var[eᶻ] = α for z ~ N(ỹ, σ²), and binary logits are the difference of two of them."""
    f, y = inputs(7, 4), labels(7, 4)
    for targets, t in ((y, one_hot(y, 4)), (soften(y, 4), soften(y, 4))):
        mean, variance = Dirichlet(epsilon).observations(f, targets)
        normal = distributions.LogNormal(mean, variance.sqrt())
        close(normal.mean, epsilon + t)
        close(normal.variance, epsilon + t)
    bit = (y > 1).unsqueeze(-1)
    mean, variance = DirichletBernoulli(epsilon).observations(f[:, :1], bit)
    pair = Dirichlet(epsilon).observations(f[:, :2], bit[:, 0].long())
    close(mean, pair[0][:, 1:] - pair[0][:, :1])
    close(variance, pair[1].sum(-1, keepdim=True))


def test_hard_labels_are_soft_labels_with_one_one() -> None:
    net, x, y = network(4), inputs(9, 3), labels(9, 4)
    for likelihood in (Dirichlet(), Dirichlet(0.01)):
        hard = lw.laplace(net, (x, y), likelihood, structure="kron")
        soft = lw.laplace(net, (x, one_hot(y, 4)), likelihood, structure="kron")
        close(hard.log_evidence(), soft.log_evidence())
        close(hard.predict(x).covariance, soft.predict(x).covariance)
        close(hard.predict(x).log_prob(y), soft.predict(x).log_prob(one_hot(y, 4)))


# -- Bayesian regression -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("form", ["primal", "dual"])
@pytest.mark.parametrize("kind", ["hard", "soft", "binary", "class without examples", "one class alone"])
def test_full_is_regression_with_known_noise(form: str, kind: str, seed: int) -> None:
    net, x, y = network(3, seed), inputs(8, 3, seed=seed), labels(8, 3, seed)
    epsilon = 0.05
    likelihood: Likelihood = Dirichlet(epsilon)
    t = one_hot(y, 3)
    if kind == "soft":
        y = t = soften(y, 3)
    elif kind == "binary":
        y = t = (inputs(8, 3, seed=seed + 50) > 0).double()
        likelihood = DirichletBernoulli(epsilon)
    elif kind != "hard":
        y = torch.where(y == 1, 2, y) if kind == "class without examples" else torch.full((8,), 2)
        t = one_hot(y, 3)
    dense = Dense(net, x, *observed(t, epsilon, kind == "binary"))
    la = lw.laplace(net, (x, y), likelihood, structure=lw.curvature.Full(form), prior=LAMBDA, factor="exact")
    check_dense(la, dense, x, 3)


def test_structures_are_exact_where_the_curvature_has_their_form() -> None:
    """One layer without bias: a block; Λ_n the same for all rows (binary): a Kronecker product; one-hot inputs: a
    diagonal, as Λ_n is; and a sketch of all of it."""
    torch.manual_seed(0)
    x, y = inputs(9, 3), labels(9, 4)
    net = nn.Linear(3, 4, bias=False).double()
    dense = Dense(net, x, *observed(one_hot(y, 4), 0.1))
    for structure in ("block", "full", lw.curvature.LowRank(rank=12)):
        check_dense(lw.laplace(net, (x, y), "dirichlet", structure=structure, prior=LAMBDA), dense, x, 4)
    bits = (inputs(9, 4, seed=8) > 0).double()
    dense = Dense(net, x, *observed(bits, 0.1, binary=True))
    for structure in ("kron", "ekfac", "block"):
        la = lw.laplace(net, (x, bits), "dirichlet_bernoulli", structure=structure, prior=LAMBDA, factor="exact")
        check_dense(la, dense, x, 4)
    x = torch.eye(3, dtype=torch.float64)[labels(9, 3, 4)]
    dense = Dense(net, x, *observed(one_hot(y, 4), 0.1))
    check_dense(lw.laplace(net, (x, y), "dirichlet", structure="diag", prior=LAMBDA), dense, x, 4)


@pytest.mark.parametrize("seed", SEEDS)
def test_weights_and_holes_are_copies_and_missing_rows(seed: int) -> None:
    net, x, y = network(3, seed), inputs(6, 3, seed=seed), labels(6, 3, seed)
    times = torch.tensor([2, 1, 0, 3, 1, 2])
    many, labels_of = x.repeat_interleave(times, 0), y.repeat_interleave(times, 0)
    weighted = Weighted(Dirichlet())
    la = lw.laplace(net, (x, weighted.pack(y, times.double())), weighted, structure="full", prior=LAMBDA)
    check_dense(la, Dense(net, many, *observed(one_hot(labels_of, 3), 0.1)), many, 3)
    soft = soften(y, 3)
    la = lw.laplace(net, (x, weighted.pack(soft, times.double())), weighted, structure="full", prior=LAMBDA)
    check_dense(la, Dense(net, many, *observed(soft.repeat_interleave(times, 0), 0.1)), many, 3)
    holes = torch.where(times == 0, -100, y)
    la = lw.laplace(net, (x, holes), Ignoring(Dirichlet()), structure="full", prior=LAMBDA)
    check_dense(la, Dense(net, x[times > 0], *observed(one_hot(y[times > 0], 3), 0.1)), x[times > 0], 3)


def test_positions_are_rows() -> None:
    net, x, y = network(3), inputs(4, 2, 3), labels(8, 3).reshape(4, 2)
    dense = Dense(net, x.reshape(-1, 3), *observed(one_hot(y.reshape(-1), 3), 0.1))
    for targets in (y, one_hot(y, 3)):
        la = lw.laplace(net, (x, targets), "dirichlet", structure="full", prior=LAMBDA, factor="exact")
        close(la.recentered().log_evidence(), dense.log_evidence(LAMBDA))
        assert la.predict(x).log_prob(targets).shape == (4, 2)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("binary", [False, True])
def test_known_noise_is_the_same_in_other_words(structure: str, binary: bool) -> None:
    """KnownNoise.pack(ỹ, σ): evidence, covariance, tangent MAP and what the evidence picks."""
    net, x, y = network(3), inputs(9, 3), labels(9, 3)
    t = (inputs(9, 3, seed=8) > 0).double() if binary else one_hot(y, 3)
    mean, variance = observed(t, 0.1, binary)
    likelihood = DirichletBernoulli() if binary else Dirichlet()
    options: dict[str, Any] = {"structure": structure, "prior": LAMBDA, "factor": "exact"}
    la = lw.laplace(net, (x, t if binary else y), likelihood, **options)
    other = lw.laplace(net, (x, KnownNoise.pack(mean, variance.sqrt())), KnownNoise(), **options)
    close(la.log_evidence(), other.log_evidence())
    close(la.predict(x).f_var, other.predict(x).f_var)
    close(la.recentered().log_evidence(), other.recentered().log_evidence())
    close(la.recentered().tangent_map.vector, other.recentered().tangent_map.vector, 1e-7)
    a, b = la.tuned(center="map"), other.tuned(center="map")
    close(a.prior.precision, b.prior.precision, 1e-5)


def test_the_evidence_picks_the_best_prior_of_the_regression() -> None:
    net, x, y = network(3), inputs(30, 3), labels(30, 3)
    dense = Dense(net, x, *observed(one_hot(y, 3), 0.1))
    la = lw.laplace(net, (x, y), "dirichlet", structure="full").tuned()
    best = float(la.prior.precision)
    close(la.log_evidence(), dense.log_evidence(best), 1e-7)
    assert all(dense.log_evidence(best) >= dense.log_evidence(best * s) for s in (0.5, 0.9, 1.1, 2.0))


# -- predictions are of classes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["auto", "probit", "probit_centered", "bridge", "monte_carlo"])
@pytest.mark.parametrize("joint", [False, True])
def test_predictions_are_those_of_categorical_for_the_same_outputs(link: str, joint: bool) -> None:
    net, x, y = network(3), inputs(7, 3), labels(7, 3)
    pred = lw.laplace(net, (x, y), "dirichlet", structure="kron").predict(x, link=link, joint=joint)
    same = Prediction(Categorical(), pred.outputs, link)
    for name in ("mean", "probs", "std", "epistemic", "aleatoric", "entropy", "expected_entropy", "mutual_information"):
        close(getattr(pred, name), getattr(same, name))
    close(pred.log_prob(y), same.log_prob(y))
    close(pred.quantile(0.3), same.quantile(0.3))
    assert torch.equal(pred.sample(5, seeded(0)), same.sample(5, seeded(0)))
    if not joint:
        assert lw.metrics.nll(pred, y) == lw.metrics.nll(same, y)
        assert lw.metrics.ece(pred, y) == lw.metrics.ece(same, y)
        assert lw.metrics.accuracy(pred, y) == lw.metrics.accuracy(same, y)


def test_binary_predictions_are_those_of_bernoulli_for_the_same_outputs() -> None:
    net, x, y = network(2), inputs(7, 3), (inputs(7, 2, seed=8) > 0).double()
    la = lw.laplace(net, (x, y), "dirichlet_bernoulli", structure="kron", prior=0.1)
    for link in ("auto", "monte_carlo"):
        pred = la.predict(x, link=link)
        same = Prediction(Bernoulli(), pred.outputs, link)
        for name in ("probs", "entropy", "mutual_information", "epistemic"):
            close(getattr(pred, name), getattr(same, name))
        close(pred.log_prob(y), same.log_prob(y))
        close(pred.quantile(0.7), same.quantile(0.7))
    z = torch.linspace(-9, 9, 4001, dtype=torch.float64)
    share = torch.softmax(-0.5 * z**2, 0)
    f = pred.f_mean.unsqueeze(-1) + pred.f_var.sqrt().unsqueeze(-1) * z
    close(pred.probs, (torch.sigmoid(f) * share).sum(-1), 1e-6)


@pytest.mark.parametrize("link", ["auto", "monte_carlo"])
def test_a_prediction_scores_labels_and_not_their_observations(link: str) -> None:
    net, x, y = network(3), inputs(20, 3), labels(20, 3)
    pred = lw.laplace(net, (x, y), "dirichlet", structure="full").predict(x, link=link)
    total = torch.stack([pred.log_prob(torch.full((20,), c)) for c in range(3)]).exp().sum(0)
    close(total, torch.ones(20, dtype=torch.float64), 1e-6)
    close(pred.log_prob(y), pred.probs.gather(-1, y[:, None]).squeeze(-1).log(), 1e-6)
    la = lw.laplace(net, (x, y), "dirichlet", structure="full")
    close(lw.predict(la.posterior, la.likelihood, x, link).log_prob(y), pred.log_prob(y))
    drawn = torch.softmax(pred.f_sample(20_000, seeded(0)), -1)
    assert float((pred.probs - drawn.mean(0)).abs().max()) < 0.05


@pytest.mark.parametrize("draws", [False, True])
def test_the_fit_of_own_data_is_that_of_labels(draws: bool) -> None:
    """Weighted and ignored rows count as in the fit; draws of outputs are scored as labels too."""
    net, x, y = network(3), inputs(12, 3), labels(12, 3)
    w = torch.rand(12, generator=seeded(2), dtype=torch.float64)
    weighted, holes = Weighted(Dirichlet()), torch.where(w < 0.4, -100, y)
    structure = "matrix_free" if draws else "kron"
    for likelihood, targets, each in (
        (Dirichlet(), y, torch.ones_like(w)),
        (Dirichlet(), soften(y, 3), torch.ones_like(w)),
        (weighted, weighted.pack(y, w), w),
        (Ignoring(Dirichlet()), holes, (holes >= 0).double()),
    ):
        la = lw.laplace(net, (x, targets), likelihood, structure=structure)
        _, plain = training_nll(la.posterior, la.likelihood, [(x, targets)], 2**30)
        log_p = torch.log_softmax(net(x).detach(), -1)
        t = targets if targets.shape == (12, 3) else one_hot(y, 3)
        assert plain == pytest.approx(float(-(each * (t * log_p).sum(-1)).mean()), rel=1e-6)


def test_ella_and_conformal_sets_are_of_classes() -> None:
    net, x, y = network(3), inputs(30, 3), labels(30, 3)
    pred = lw.gp.ella(net, (x, y), "dirichlet", rank=6).predict(x, link="monte_carlo")
    close(pred.log_prob(y), pred.probs.gather(-1, y[:, None]).squeeze(-1).log(), 1e-6)
    assert lw.conformal.calibrate(pred, y).sets(pred).shape == (30, 3)


def test_held_out_labels_tune_it() -> None:
    net, x, y = sure_network()
    la = lw.laplace(net, (x, y), "dirichlet", structure="kron")
    other, wrong = inputs(90, 2, seed=9) + x, torch.where(torch.arange(90) % 7 == 0, (y + 1) % 3, y)
    hard = la.tuned(method="validation", data=(other, wrong), fixed="temperature")
    soft = la.tuned(method="validation", data=(other, one_hot(wrong, 3)), fixed="temperature")
    close(hard.prior.precision, soft.prior.precision)

    def nll(precision: float) -> float:
        return lw.metrics.nll(la.replace(prior=precision).predict(other), wrong)

    best = float(hard.prior.precision)
    assert nll(best) <= min(nll(best * s) for s in (0.3, 0.8, 1.25, 3.0))


# -- around it -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [Dirichlet(0.02), DirichletBernoulli(0.3), Weighted(Dirichlet(0.02))])
def test_a_file_gives_it_back(likelihood: Any, tmp_path: Path) -> None:
    net, x, y = network(2), inputs(8, 3), labels(8, 2)
    targets = one_hot(y, 2) if isinstance(likelihood, DirichletBernoulli) else y
    targets = likelihood.pack(y, torch.ones(8)) if isinstance(likelihood, Weighted) else targets
    la = lw.laplace(net, (x, targets), likelihood, structure="kron").tuned(center="map")
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", net)
    assert back.likelihood.kind == likelihood.kind
    assert torch.equal(back.log_evidence(), la.log_evidence())
    assert torch.equal(back.predict(x).probs, la.predict(x).probs)


def test_evidences_of_different_concentrations_do_not_compare() -> None:
    net, data = network(3), (inputs(9, 3), labels(9, 3))
    one, other = (lw.laplace(net, data, Dirichlet(e), structure="kron") for e in (0.1, 0.01))
    with pytest.raises(LapwingError, match="densities are of different things"):
        lw.compare({"a": one, "b": other})
    with pytest.raises(LapwingError, match="fit again"):
        one.replace(likelihood=Dirichlet(0.01))
    with pytest.raises(LapwingError, match="densities are of different things"):
        lw.compare({"a": one, "b": lw.laplace(net, data, "categorical", structure="kron")})


@pytest.mark.usefixtures("hasty_doctor")
def test_a_network_that_fits_its_labels_does_not_blind_it() -> None:
    """Where softmax's curvature vanishes, the doctor has nothing to say, and `tuned` keeps the fit (no warning)."""
    net, x, y = sure_network()
    for targets in (y, one_hot(y, 3)):
        report = lw.doctor(net, (x, targets), "dirichlet")
        assert all(finding.severity != "error" for finding in report.findings), report
        assert "fits its training data" not in str(report)
    untrained = nn.Sequential(nn.Linear(2, 20), nn.ReLU(), nn.Linear(20, 3)).double()
    assert "the network is not trained" in str(lw.doctor(untrained, (x, y), "dirichlet"))
    assert "fits its training data" in str(lw.doctor(net, (x, y), "categorical"))
    la = lw.laplace(net, (x, y), "dirichlet", structure="kron").tuned(center="map")
    mine, plain = la.tuning.train_nll
    assert mine < plain + 0.1


def test_thousands_of_labels_need_no_matrix_of_them() -> None:
    c = 20_000  # a matrix of them would have 3.2 GB
    f, y, likelihood = inputs(3, c), labels(3, c), Dirichlet()
    v = inputs(2, 3, c, seed=1)
    _, variance = observed(one_hot(y, c), 0.1)
    close(likelihood.curvature_product(f, y, v), v / variance)
    close(likelihood.curvature_trace(f, y), (1 / variance).sum(-1))
    assert likelihood.sampled_scores(f, y, 2, seeded(0)).shape == (3, c, 2)
    torch.manual_seed(0)
    net, x = nn.Linear(3, 2000).double(), inputs(5, 3)
    la = lw.laplace(net, (x, labels(5, 2000)), "dirichlet", structure="diag")
    assert torch.isfinite(la.log_evidence())
    assert la.predict(x[:1]).log_prob(torch.tensor([1999])).shape == (1,)


def test_single_precision_keeps_the_smallest_concentrations() -> None:
    net, x, y = network(3), inputs(9, 3), labels(9, 3)
    single = network(3).float()
    for epsilon in (1e-20, 0.1, 1e3):
        exact = lw.laplace(net, (x, y), Dirichlet(epsilon), structure="full", prior=LAMBDA).log_evidence()
        close(
            lw.laplace(single, (x.float(), y), Dirichlet(epsilon), structure="full", prior=LAMBDA).log_evidence(),
            exact,
            1e-4,
        )


F3, Y3 = torch.zeros(4, 3), torch.tensor([0, 1, 2, 0])
BAD: list[tuple[Likelihood, Tensor, Tensor, str]] = [
    (Dirichlet(), torch.zeros(4, 1), torch.zeros(4).long(), "at least 2 outputs.*'dirichlet_bernoulli'"),
    (Dirichlet(), F3, torch.tensor([0, 1, 3, 0]), r"labels run from 0 to 3, outside 0\.\.2"),
    (Dirichlet(), F3, torch.tensor([0, -100, 2, 0]), r"labels run from -100"),
    (Dirichlet(), F3, Y3.float(), r"dirichlet targets must be integer class labels.*y\.long\(\)"),
    (Dirichlet(), F3, Y3.bool(), "integer class labels"),
    (Dirichlet(), F3, torch.full((4, 3), 0.5), "adds up to 1; got .* sums from 1.5 to 1.5"),
    (Dirichlet(), F3, torch.tensor([[1.5, -0.5, 0.0]]).expand(4, 3), "not negative"),
    (Dirichlet(), F3, torch.full((4, 3), math.nan), "adds up to 1"),
    (Dirichlet(), F3, torch.full((4, 2), 0.5), "do not match outputs"),
    (Ignoring(Dirichlet()), F3, torch.full((4, 3), 1 / 3), "ignoring is for integer labels.*Weighted"),
    (ClassWeighted(Dirichlet(), (1.0, 2.0, 3.0)), F3, torch.full((4, 3), 1 / 3), "classweighted is for integer labels"),
    (ClassWeighted(Dirichlet(), (1.0, 2.0)), F3, Y3, "2 class weights for 3 classes"),
    (Weighted(Dirichlet()), F3, torch.full((4, 4), 0.5), "adds up to 1"),
    (Weighted(Dirichlet()), F3, torch.full((4, 2), 0.5), "whole numbers"),
    (DirichletBernoulli(), F3, torch.full((4, 3), 0.5), "must be 0 or 1"),
]


@pytest.mark.parametrize("case", range(len(BAD)))
def test_bad_targets_are_named(case: int) -> None:
    likelihood, f, y, says = BAD[case]
    with pytest.raises(InvalidValue, match=says):
        likelihood.validate(f, y)
    net = nn.Linear(2, f.shape[-1])
    with pytest.raises(InvalidValue, match=says):
        lw.laplace(net, (torch.randn(4, 2, generator=seeded(0)), y), likelihood)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (torch.tensor([[1.0, 1.0, 0.0], [0.0, 0.0, 0.0]]), "any number of labels a row.*'dirichlet_bernoulli'"),
        (torch.tensor([[0.9, 0.0, 0.0], [0.4, 0.4, 0.2]]), "Divide each row by its sum"),
        (torch.tensor([[3.0, -1.0, 0.5], [0.4, 0.4, 0.2]]), "regression targets"),
        (torch.tensor([0, -100]), r"Ignoring\(likelihood, -100\)"),
    ],
)
def test_bad_targets_are_told_what_to_do(targets: Tensor, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        lw.laplace(nn.Linear(2, 3), (torch.randn(2, 2, generator=seeded(0)), targets), "classification")


@pytest.mark.parametrize(
    ("labels", "outputs", "says"),
    [
        (torch.tensor([0, 2, 3]).repeat(40), 6, "no example of 120 has the label 1, 4, 5, of 6 outputs"),
        (torch.tensor([0, 1]).repeat(200), 9, "has the label 2, 3, 4, 5, 6 and 2 more, of 9 outputs"),
        (torch.zeros(5).long() + 1, 3, "all 5 examples have the label 1"),
        (torch.tensor([0, 1]).repeat(200), 2, ""),
        (torch.tensor([0, 1]), 3, ""),
    ],
)
def test_classes_without_examples_are_told_by_the_doctor(labels: Tensor, outputs: int, says: str) -> None:
    x = torch.randn(len(labels), 2, generator=seeded(0))
    found = lw.doctor(nn.Linear(2, outputs), (x, labels), "classification")
    notes = [one.message for one in found.findings if one.severity == "note" and one.topic == "targets"]
    assert len(notes) == bool(says)
    assert not says or says in notes[0]


@pytest.mark.parametrize("one", [Dirichlet, DirichletBernoulli])
@pytest.mark.parametrize("epsilon", [0, -0.1, math.nan, math.inf, 1e-30, 1e9, [0.1, 0.2], "much"])
def test_a_concentration_is_one_positive_number(one: Any, epsilon: Any) -> None:
    with pytest.raises(InvalidValue, match="concentration"):
        one(epsilon)


def test_the_direction_that_log_ratios_do_not_see_is_empty_in_float32_too() -> None:
    """2,000 labels of 10 classes are 20,000 rows; their sum in float32 once left -2e-4 of the largest eigenvalue."""
    y = torch.randint(10, (2000,), generator=seeded(0))
    net = nn.Sequential(nn.Linear(3, 10))
    la = lw.laplace(net, (torch.randn(2000, 3, generator=seeded(1)), y), LogRatio(), structure="kron")
    root = LogRatio().curvature_root(torch.zeros(2000, 10).double(), y)
    close(la.state.sums["0/B"][0, 0].double() / 2000, torch.einsum("nck,ndk->cd", root, root) / 2000, 1e-5)
    la.tuned(center="map")
