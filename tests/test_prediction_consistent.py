"""No two fields of one prediction contradict each other: what follows from the mean follows from the fields beside it.

A class is a 0/1 variable: its variance is m (1 − m), its entropy H(m), its log-probability log m, whatever the link.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot
from torch.testing import assert_close

import helpers
import lapwing as lw
from lapwing.likelihoods import (
    Bernoulli,
    BradleyTerry,
    Categorical,
    Gaussian,
    HeteroscedasticGaussian,
    Ignoring,
    LabelSmoothing,
    NegativeBinomial,
    Ordinal,
    Poisson,
    SoftLabels,
    StudentT,
)

SOFTMAX = ("auto", "probit", "probit_centered", "mean_field", "bridge", "bridge_norm", "monte_carlo")
CLASSES: dict[str, tuple[Any, int, tuple[str, ...]]] = {  # likelihood, outputs, links
    "categorical": (Categorical(), 4, SOFTMAX),
    "soft": (SoftLabels(), 3, SOFTMAX),
    "smoothed": (LabelSmoothing(0.2).plain, 3, SOFTMAX),
    "preferences": (BradleyTerry(), 2, SOFTMAX),
    "ignoring": (Ignoring(), 3, SOFTMAX),
    "binary": (Bernoulli(), 1, ("auto", "probit", "monte_carlo")),
    "multilabel": (Bernoulli(), 3, ("auto", "probit", "monte_carlo")),
    "ordinal": (Ordinal((-1.0, 0.3, 2.0)), 1, ("auto", "monte_carlo")),
}
CASES = [(kind, link) for kind, (_, _, links) in CLASSES.items() for link in links]
SCALES = (1e-3, 1.0, 6.0, 200.0)


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    helpers.close(actual, expected, tolerance)


def outputs(seed: int, c: int, scale: float, n: int = 5) -> tuple[Tensor, Tensor]:
    """μ (n, c) and V (n, c, c), correlated."""
    generator = torch.Generator().manual_seed(seed)
    root = scale * torch.randn(n, c, c, generator=generator, dtype=torch.float64) / math.sqrt(c)
    return 2 * torch.randn(n, c, generator=generator, dtype=torch.float64), root @ root.mT


def predicted(kind: str, link: str, seed: int = 0, scale: float = 1.0) -> lw.Prediction:
    likelihood, c, _ = CLASSES[kind]
    return lw.Prediction(likelihood, lw.outputs.Normal(*outputs(seed, c, scale)), link)


def entropy(m: Tensor, binary: bool) -> Tensor:
    p = torch.stack([m, 1 - m], -1) if binary else m
    return -torch.xlogy(p, p).sum(-1)


def each_class(prediction: lw.Prediction) -> Tensor:
    """p(y) of every class by log_prob, (n, ..., classes)."""
    shape, k = prediction.f_mean.shape[:-1], prediction.probs.shape[-1]
    labels = [torch.full(shape, j) for j in range(k)]
    if prediction.likelihood.event and not prediction.likelihood.elementwise:
        labels = [one_hot(y, k).double() for y in labels]
    return torch.stack([prediction.log_prob(y) for y in labels], -1).exp()


# -- classes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("kind", "link"), CASES)
def test_variances_and_entropies_are_those_of_the_mean(kind: str, link: str) -> None:
    for seed, scale in itertools.product((0, 1), SCALES):
        p = predicted(kind, link, seed, scale)
        close(p.total, p.mean * (1 - p.mean))
        close(p.total, p.epistemic + p.aleatoric)
        close(p.std, p.total.sqrt())
        close(p.entropy, entropy(p.mean, kind in ("binary", "multilabel")))
        close(p.entropy, p.expected_entropy + p.mutual_information)
        assert (p.epistemic >= 0).all()
        assert (p.aleatoric >= 0).all()
        assert (p.mutual_information >= 0).all()
        assert (p.expected_entropy >= 0).all()


@pytest.mark.parametrize(("kind", "link"), [case for case in CASES if case[0] not in ("binary", "multilabel")])
def test_log_prob_of_every_class_is_the_log_of_its_mean(kind: str, link: str) -> None:
    for seed, scale in itertools.product((0, 1), SCALES):
        p = predicted(kind, link, seed, scale)
        close(each_class(p), p.probs)
        close(each_class(p).sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.parametrize("link", CLASSES["binary"][2])
def test_log_prob_of_a_binary_label_is_the_log_of_its_mean(link: str) -> None:
    for seed, scale in itertools.product((0, 1), SCALES):
        p = predicted("binary", link, seed, scale)
        close(p.log_prob(torch.ones(5, 1)).exp(), p.mean.squeeze(-1))
        close(p.log_prob(torch.zeros(5, 1)).exp(), 1 - p.mean.squeeze(-1))


def test_the_density_of_dependent_labels_has_the_means_as_its_marginals() -> None:
    """Of several labels together by 512 draws with their covariance; of each by quadrature."""
    for seed, scale in itertools.product((0, 1, 2), (0.3, 1.0, 3.0)):
        p = predicted("multilabel", "auto", seed, scale)
        every = torch.tensor([*itertools.product((0, 1), repeat=3)])
        weight = torch.stack([p.log_prob(y.expand(5, 3)) for y in every], -1).exp()  # (n, 8)
        close(weight.sum(-1), torch.ones(5, dtype=torch.float64))
        assert_close(weight @ every.double(), p.mean, rtol=0, atol=0.01)


@pytest.mark.parametrize("kind", CLASSES)
def test_auto_is_the_nodes_for_classes(kind: str) -> None:
    auto, nodes = (predicted(kind, link) for link in ("auto", "monte_carlo"))
    for field in ("mean", "epistemic", "aleatoric", "entropy", "mutual_information"):
        close(getattr(auto, field), getattr(nodes, field), 0.0)
    likelihood, c, _ = CLASSES[kind]
    mean, cov = outputs(0, c, 1.0)
    f = torch.distributions.MultivariateNormal(mean, cov + 1e-12 * torch.eye(c)).sample((100_000,))
    assert_close(auto.mean, likelihood.mean(f).mean(0), rtol=0, atol=0.01)
    assert_close(auto.epistemic, likelihood.mean(f).var(0), rtol=0, atol=0.01)


@pytest.mark.parametrize(("kind", "link"), [case for case in CASES if case[1] not in ("auto", "monte_carlo")])
def test_a_link_by_name_has_the_shares_of_the_nodes(kind: str, link: str) -> None:
    for seed in (0, 1):
        p, nodes = predicted(kind, link, seed), predicted(kind, "monte_carlo", seed)
        close(p.epistemic / p.total, nodes.epistemic / nodes.total)
        close(p.mutual_information / p.entropy, nodes.mutual_information / nodes.entropy)
        if link != "bridge" or kind != "preferences":
            assert float((p.mean - nodes.mean).abs().max()) > 1e-3  # it is another mean


@pytest.mark.parametrize(("kind", "link"), CASES)
def test_samples_have_the_mean(kind: str, link: str) -> None:
    p, s = predicted(kind, link), 20_000
    y = p.sample(s, torch.Generator().manual_seed(1))
    y = one_hot(y, p.mean.shape[-1]) if y.ndim == 2 else y
    assert_close(y.double().mean(0), p.mean, rtol=0, atol=5 * 0.5 / math.sqrt(s) + 0.005)


@pytest.mark.parametrize(("kind", "link"), CASES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_saturated_predictions_have_no_nan(kind: str, link: str, dtype: torch.dtype) -> None:
    likelihood, c, _ = CLASSES[kind]
    mean, cov = outputs(0, c, 1.0)
    far = 5000 * torch.arange(1, 6).unsqueeze(-1) * torch.linspace(-1, 1, c if c > 1 else 1)
    for size in (0.0, 1e-12, 1.0, 1e8):
        p = lw.Prediction(likelihood, lw.outputs.Normal((mean + far).to(dtype), (size * cov).to(dtype)), link)
        for field in ("mean", "epistemic", "aleatoric", "total", "entropy", "expected_entropy", "mutual_information"):
            value = getattr(p, field)
            assert torch.isfinite(value).all(), (field, value)
            assert (value >= 0).all(), (field, value)
        y = p.sample(1)[0]
        assert torch.isfinite(p.log_prob(y)).all()
        other = 1 - y if y.is_floating_point() else (y + 1) % p.mean.shape[-1]
        if kind != "soft":
            assert torch.isfinite(p.log_prob(other)).all()


@pytest.mark.parametrize(("kind", "link"), CASES)
def test_float32_is_float64_rounded(kind: str, link: str) -> None:
    wide = predicted(kind, link, scale=2.0)
    p = replace(wide, outputs=lw.outputs.Normal(wide.f_mean.float(), wide.covariance.float()))
    for field in ("mean", "epistemic", "aleatoric", "total", "std", "entropy", "mutual_information"):
        assert getattr(p, field).dtype == torch.float32
        assert_close(getattr(p, field).double(), getattr(wide, field), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("kind", "link"), CASES)
def test_an_input_does_not_depend_on_its_company(kind: str, link: str) -> None:
    """Nodes are those of each input alone, narrow or wide."""
    likelihood, c, _ = CLASSES[kind]
    mean, cov = outputs(0, c, 1.0)
    cov = cov * torch.tensor([1e-6, 1.0, 1e5, 40.0, 1e9], dtype=torch.float64)[:, None, None]
    p = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov), link)
    for i in range(5):
        for field in ("mean", "epistemic", "mutual_information"):
            close(getattr(p[i : i + 1], field), getattr(p, field)[i : i + 1], 1e-12)
        close(p[i : i + 1].quantile(0.7), p.quantile(0.7)[i : i + 1], 1e-12)


# -- positions, joint predictions, draws -------------------------------------------------------------------------------


def fitted(positions: bool) -> tuple[lw.Laplace, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 4), nn.Tanh(), nn.Linear(4, 3)).double()
    shape = (9, 5, 2) if positions else (9, 2)
    x = torch.randn(shape).double()
    return lw.laplace(model, (x, torch.randint(3, shape[:-1])), "categorical", prior=0.1), 3 * x[:4]


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("how", [{}, {"joint": True}, {"via": "network"}, {"link": "probit"}], ids=str)
def test_fields_agree_at_positions_together_and_by_draws(positions: bool, how: dict[str, Any]) -> None:
    la, new = fitted(positions)
    p = la.predict(new, **how)
    assert p.mean.shape == (*new.shape[:-1], 3)
    assert p.entropy.shape == new.shape[:-1]
    close(p.total, p.mean * (1 - p.mean))
    close(p.total, p.epistemic + p.aleatoric)
    close(p.entropy, entropy(p.mean, binary=False))
    close(p.entropy, p.expected_entropy + p.mutual_information)
    close(p[1:3].epistemic, p.epistemic[1:3], 1e-12)
    if not p.joint:
        close(each_class(p), p.probs)


# -- the others --------------------------------------------------------------------------------------------------------

OTHERS: dict[str, tuple[Any, int]] = {
    "poisson": (Poisson(), 1),
    "counts": (NegativeBinomial(3.0), 2),
    "student": (StudentT(0.5, 5.0), 2),
    "gaussian": (Gaussian(0.4), 2),
    "natural": (HeteroscedasticGaussian(), 2),
}


@pytest.mark.parametrize("kind", OTHERS)
def test_real_targets_and_counts_are_consistent_too(kind: str) -> None:
    likelihood, c = OTHERS[kind]
    mean, cov = outputs(1, c, 0.3)
    if kind == "natural":
        mean, cov = torch.stack([mean[:, 0], -1 - mean[:, 1].abs()], -1), 0.01 * cov
    p, s = lw.Prediction(likelihood, lw.outputs.Normal(mean, cov)), 40_000
    close(p.total, p.epistemic + p.aleatoric)
    close(p.std, p.total.sqrt())
    y = p.sample(s, torch.Generator().manual_seed(2))
    assert ((y.mean(0) - p.mean).abs() < 6 * p.std / math.sqrt(s)).all()
    assert_close(y.var(0), p.total, rtol=0.15, atol=0.0)
    low, high = p.interval(0.8)
    covered = ((low <= y) & (y <= high)).double().mean(0)
    assert (covered > 0.8 - 0.01).all()
    if kind == "poisson":
        at = torch.arange(400.0).double()
        each = torch.stack([p.pmf(torch.full((5, 1), float(k))) for k in at])
        close(p.log_prob(torch.full((5, 1), 3.0)).exp(), each[3].squeeze(-1))
        close(each.sum(0), torch.ones(5, 1, dtype=torch.float64), 1e-8)
        close((at[:, None, None] * each).sum(0), p.mean, 1e-6)
        close(p.cdf(torch.full((5, 1), 3.0)), each[:4].sum(0), 1e-8)


@dataclass(frozen=True)
class Rate(Poisson):
    """Without a variance."""

    def variance(self, f: Tensor) -> Tensor:
        raise lw.errors.Unsupported("no variance")


def test_a_mean_needs_no_variance() -> None:
    mean, cov = outputs(0, 1, 0.3)
    p = lw.Prediction(Rate(), lw.outputs.Normal(mean, cov))
    close(p.mean, torch.exp(mean + 0.5 * cov[:, 0]))
    with pytest.raises(lw.errors.Unsupported, match="no variance"):
        p.total  # noqa: B018


@dataclass(frozen=True)
class Bounded(Bernoulli):
    """A label whose logit must be below 3: some draws of f have no meaning."""

    elementwise: ClassVar[bool] = False
    response: ClassVar[str] = ""

    def inside(self, f: Tensor) -> Tensor:
        return (f < 3).all(-1)


def test_quantiles_of_probabilities_weigh_the_nodes() -> None:
    """Of a monotone function: that of f; on the line, among draws, and among those that are left."""
    normal = torch.distributions.Normal(0.0, 1.0)
    for scale in (0.1, 2.0, 30.0):
        mean, cov = outputs(0, 3, scale)
        std = cov.diagonal(dim1=-2, dim2=-1).sqrt()
        for q in (0.025, 0.3, 0.5, 0.9):
            z = float(normal.icdf(torch.tensor(q)))
            found = lw.Prediction(Bernoulli(), lw.outputs.Normal(mean, cov)).quantile(q)
            assert_close(found, torch.sigmoid(mean + z * std), rtol=0, atol=2e-3)
    one = lw.Prediction(Bounded(), lw.outputs.Normal(torch.full((1, 1), 2.0).double(), torch.ones(1, 1, 1).double()))
    with pytest.warns(lw.errors.LapwingWarning, match="left out"):
        found = one.quantile(0.8)
    inside = normal.cdf(torch.tensor(1.0))  # f < 3 is z < 1
    assert_close(found[0, 0], torch.sigmoid(2 + normal.icdf(0.8 * inside)).double(), rtol=0, atol=0.01)


@pytest.mark.parametrize("c", [2, 3, 6])
def test_the_normalized_bridge_is_the_bridge_of_scaled_logits(c: int) -> None:
    """f / √s has the variance of f over s: both by hand on the plane Σ f = 0."""
    for seed, scale in ((0, 1.0), (1, 0.3), (2, 5.0)):
        mean, cov = outputs(seed, c, scale)
        gain = cov.sum(-1) / cov.sum((-1, -2)).unsqueeze(-1)
        f, var = mean - gain * mean.sum(-1, keepdim=True), cov.diagonal(dim1=-2, dim2=-1) - gain * cov.sum(-1)
        f = f / (var.mean(-1, keepdim=True) / math.sqrt(c / 2)).sqrt()
        alpha = (1 - 2 / c + (f.unsqueeze(-1) - f.unsqueeze(-2)).exp().sum(-1) / c**2) / var
        found = lw.Prediction(Categorical(), lw.outputs.Normal(mean, cov), "bridge_norm").probs
        close(found, alpha / alpha.sum(-1, keepdim=True), 1e-7)


def test_what_a_prediction_is_by_stands_in_its_first_line() -> None:
    assert "link monte_carlo" in repr(predicted("categorical", "auto"))
    assert "link probit" in repr(predicted("categorical", "probit"))
    drawn = replace(predicted("categorical", "auto"), outputs=lw.outputs.Draws(outputs(0, 4, 1.0)[0].expand(7, 5, 4)))
    assert "7 draws" in repr(drawn)


# -- extremes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("gap", [1.0, 80.0, 95.0, 3000.0])
def test_the_bridge_does_not_overflow(dtype: torch.dtype, gap: float) -> None:
    """α_k ∝ (1 − 2/c + c⁻² Σ_l exp(f_k − f_l)) / V_kk in float64 by hand, where exp can be had."""
    for c in (2, 3, 5):
        mean = torch.linspace(0, gap, c, dtype=dtype).expand(2, c)
        cov = torch.diag_embed(torch.linspace(1, 2, c, dtype=dtype)).expand(2, c, c)
        found = lw.Prediction(Categorical(), lw.outputs.Normal(mean, cov), "bridge").probs.double()
        assert torch.isfinite(found).all()
        close(found.sum(-1), torch.ones(2, dtype=torch.float64), 1e-6)
        V = cov[0].double()
        gain = V.sum(-1) / V.sum()
        f, var = mean[0].double() - gain * mean[0].double().sum(), V.diagonal() - gain * V.sum(-1)
        if gap < 500:
            alpha = (1 - 2 / c + (f.unsqueeze(-1) - f).exp().sum(-1) / c**2) / var
            close(found[0], alpha / alpha.sum(), 1e-5 if dtype == torch.float32 else 1e-10)
        else:
            close(found[0, -1:], torch.ones(1, dtype=torch.float64), 1e-6)


def test_links_in_closed_form_take_variances_of_any_size() -> None:
    """A common shift of 1e300 leaves rounding of either sign when it is projected out."""
    for link, c in itertools.product(SOFTMAX, range(2, 9)):
        mean, cov = outputs(c, c, 1.0)
        for shift in (1e30, 1.1e300, 1.7e300):
            p = lw.Prediction(Categorical(), lw.outputs.Normal(mean, cov + shift), link)
            assert torch.isfinite(p.probs).all()
            close(p.probs.sum(-1), torch.ones(5, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:the posterior predicts its own training data")
@pytest.mark.filterwarnings("ignore:.*variances of outputs are below the rounding")
@pytest.mark.parametrize("likelihood", ["categorical", "bernoulli", "gaussian"])
def test_a_prior_of_almost_nothing_gives_numbers_or_says_what_overflows(likelihood: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(9, 3)
    y = {"categorical": torch.randint(3, (9,)), "bernoulli": torch.randint(2, (9, 3)), "gaussian": torch.randn(9, 3)}
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 3))
    with pytest.raises(lw.errors.InvalidValue, match=r"of [0-9]+ variances .* float32, .* prior precision, .*double"):
        lw.laplace(model, (x, y[likelihood]), likelihood, structure="full", prior=1e-300).predict(3 * x[:4])
    targets = y[likelihood].double() if likelihood == "gaussian" else y[likelihood]
    la = lw.laplace(model.double(), (x.double(), targets), likelihood, structure="full", prior=1e-300)
    p = la.predict(3 * x[:4].double())
    for field in ("mean", "epistemic", "aleatoric", "total", "std"):
        assert torch.isfinite(getattr(p, field)).all()
    assert float(p.f_var.max()) > 1e290
    assert torch.isfinite(p.log_prob(targets[:4])).all()


def test_outputs_that_are_not_numbers_are_refused_at_once() -> None:
    mean, cov = outputs(0, 3, 1.0)
    with pytest.raises(lw.errors.InvalidValue, match="1 of 15 mean outputs are NaN"):
        lw.Prediction(
            Categorical(), lw.outputs.Normal(torch.where(torch.arange(15).reshape(5, 3) == 4, math.nan, mean), cov)
        )
    with pytest.raises(lw.errors.InvalidValue, match=r"45 of 45 variances .* float64, which ends at 1\.8e\+308"):
        lw.Prediction(Categorical(), lw.outputs.Normal(mean, math.inf * torch.ones_like(cov)))


def test_moments_of_counts_beyond_the_largest_float_are_infinite_not_nan() -> None:
    mean = torch.zeros(2, 1)
    cov = torch.tensor([4.0, 1e8]).reshape(2, 1, 1)
    p = lw.Prediction(Poisson(), lw.outputs.Normal(mean, cov))
    assert_close(p.mean[0].double(), torch.exp(torch.tensor([2.0]).double()), rtol=1e-6, atol=0)
    for field in ("mean", "epistemic", "aleatoric", "total", "std"):
        assert not bool(getattr(p, field).isnan().any())
        assert bool(getattr(p, field)[1].isinf().all())


def test_gaussian_densities_hold_where_the_square_of_the_noise_leaves_float32() -> None:
    mean, cov = outputs(0, 2, 1.0)
    for noise in (1e-25, 1e25):
        p = lw.Prediction(Gaussian(noise), lw.outputs.Normal(mean.float(), 0 * cov.float()))
        y = p.mean + 0.5 * noise
        expected = torch.distributions.Normal(p.mean.double(), noise).log_prob(y.double()).sum(-1)
        assert_close(p.log_prob(y), expected, rtol=1e-6, atol=1e-6)


def test_a_quantile_beyond_all_floats_is_told() -> None:
    p = lw.Prediction(Poisson(), lw.outputs.Normal(torch.zeros(1, 1).double(), torch.full((1, 1, 1), 1e12).double()))
    with pytest.raises(lw.errors.NotConverged, match="raise the prior precision"):
        p.quantile(0.9)


def test_a_noise_whose_square_is_beyond_float64_is_refused() -> None:
    for noise in (1e-200, 1e200):
        with pytest.raises(lw.errors.InvalidValue, match=r"noise .* between 1e-150 and 1e150"):
            Gaussian(noise)
        with pytest.raises(lw.errors.InvalidValue, match=r"scale .* between 1e-150 and 1e150"):
            StudentT(noise)
    mean, cov = outputs(0, 2, 1.0)
    with pytest.raises(lw.errors.NotPositiveDefinite, match=r"5 of 5 inputs.*larger noise"):
        lw.Prediction(Vanishing(), lw.outputs.Normal(mean, 0 * cov)).log_prob(mean)


@dataclass(frozen=True)
class Vanishing(Gaussian):
    """No noise at all."""

    def noise_covariance(self, f: Tensor) -> Tensor:
        return f.new_zeros(*f.shape, f.shape[-1])
