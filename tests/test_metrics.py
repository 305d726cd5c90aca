"""lapwing.metrics: closed forms, brute force, and scikit-learn and scipy as oracles."""

from __future__ import annotations

import dataclasses
import itertools
import math
import sys
from typing import Any

import numpy as np
import pytest
import torch
from scipy import integrate, stats
from sklearn import metrics as sk
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing import metrics as m
from lapwing.errors import InvalidValue, Unsupported
from lapwing.metrics.joint import sets_of

SEEDS = (0, 1, 2)


def classes(seed: int, n: int = 57, c: int = 5, sharp: float = 2.0) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(sharp * torch.randn(n, c, generator=g, dtype=torch.float64), -1)
    return p, torch.randint(c, (n,), generator=g)


def gaussians(seed: int, *shape: int) -> tuple[tuple[Tensor, Tensor], Tensor]:
    g = torch.Generator().manual_seed(seed)
    mean, y = (2 * torch.randn(shape, generator=g, dtype=torch.float64) for _ in range(2))
    return (mean, 0.3 + torch.rand(shape, generator=g, dtype=torch.float64)), y


@pytest.fixture
def predictions() -> dict[str, tuple[lw.Prediction, Tensor]]:
    """One Prediction a likelihood, at inputs with targets."""
    g = torch.Generator().manual_seed(4)
    x = torch.randn(40, 3, generator=g, dtype=torch.float64)
    net = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    targets = {
        "gaussian": torch.randn(40, 2, generator=g, dtype=torch.float64),
        "bernoulli": torch.randint(2, (40, 2), generator=g),
        "categorical": torch.randint(2, (40,), generator=g),
    }
    return {name: (lw.laplace(net, (x, y), name).predict(x[:11]), y[:11]) for name, y in targets.items()}


# -- scores ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_nll_brier_and_accuracy_are_those_of_scikit_learn(seed):
    p, y = classes(seed)
    assert m.nll(p, y) == pytest.approx(sk.log_loss(y, p, labels=range(5)), abs=1e-10)
    assert m.accuracy(p, y) == pytest.approx(sk.accuracy_score(y, p.argmax(-1)), abs=1e-12)
    onehot = np.eye(5)[y]
    assert m.brier(p, y) == pytest.approx(((p.numpy() - onehot) ** 2).sum(1).mean(), abs=1e-12)
    q, z = classes(seed, c=2)
    assert m.brier(q, z) == pytest.approx(2 * sk.brier_score_loss(z, q[:, 1]), abs=1e-12)


def test_each_has_an_example_a_row_and_its_mean_is_the_number():
    p, y = classes(3)
    p, y = p[:56].reshape(8, 7, 5), y[:56].reshape(8, 7)  # positions
    for metric in (m.nll, m.brier, m.accuracy):
        each = metric(p, y, each=True)
        assert each.shape == y.shape
        assert float(each.mean()) == pytest.approx(metric(p, y), abs=1e-12)
    pair, t = gaussians(3, 8, 7)
    assert m.nll(pair, t, each=True).shape == (8,)
    for one_by_one in (m.crps, m.coverage):
        assert one_by_one(pair, t, each=True).shape == (8, 7)


def test_nll_is_infinite_where_what_happened_had_no_probability():
    p = torch.tensor([[1.0, 0.0], [0.5, 0.5]])
    assert m.nll(p, torch.tensor([1, 0])) == math.inf
    assert m.nll(p, torch.tensor([0, 0])) == pytest.approx(math.log(2) / 2)


@pytest.mark.parametrize("seed", SEEDS)
def test_gaussian_nll_is_scipys_summed_over_outputs(seed):
    (mean, std), y = gaussians(seed, 9, 3)
    expected = -stats.norm.logpdf(y, mean, std).sum(1)
    assert_close(m.nll((mean, std), y, each=True), torch.as_tensor(expected), rtol=0, atol=1e-10)
    one = -stats.norm.logpdf(y[:, 0], mean[:, 0], std[:, 0])
    assert_close(m.nll((mean[:, 0], std[:, 0]), y[:, 0], each=True), torch.as_tensor(one), rtol=0, atol=1e-10)


def test_paired_is_the_t_test_of_the_differences():
    a, b = (m.brier(*classes(seed), each=True) for seed in (0, 1))
    got, expected = m.paired(a, b), stats.ttest_rel(a, b)
    assert got.value == pytest.approx(float(a.mean() - b.mean()), abs=1e-12)
    assert got.value / got.standard_error == pytest.approx(expected.statistic, rel=1e-10)
    assert got.interval == pytest.approx(tuple(expected.confidence_interval(0.9)), rel=1e-4)


def test_paired_takes_an_examples_positions_for_one_example():
    g = torch.Generator().manual_seed(0)
    a, b = torch.randn(20, 6, generator=g).double(), torch.randn(20, 6, generator=g).double()
    got, by_rows = m.paired(a, b), m.paired(a.mean(1), b.mean(1))
    assert (got.value, got.standard_error) == pytest.approx((by_rows.value, by_rows.standard_error))


# -- calibration -------------------------------------------------------------------------------------------------


def ece_by_loops(confidence: Any, happened: Any, edges: list[float]) -> float:
    """Σ_b |Σ_{i in b} (1[happened_i] − confidence_i)| / n, bins [e_b, e_b+1), the last closed."""
    total = 0.0
    for b in range(len(edges) - 1):
        last = b == len(edges) - 2
        inside = [
            i for i, v in enumerate(confidence) if edges[b] <= v and (v < edges[b + 1] or (last and v <= edges[b + 1]))
        ]
        total += abs(sum(float(happened[i]) - float(confidence[i]) for i in inside))
    return total / len(confidence)


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("bins", [1, 4, 15])
def test_ece_is_that_of_loops_over_bins(seed, bins):
    p, y = classes(seed)
    confidence, label = p.max(-1)
    width = [k / bins for k in range(bins + 1)]
    assert m.ece(p, y, bins) == pytest.approx(ece_by_loops(confidence, label == y, width), abs=1e-12)
    each = [ece_by_loops(p[:, c], y == c, width) for c in range(5)]
    assert m.ece(p, y, bins, classwise=True) == pytest.approx(sum(each) / 5, abs=1e-12)

    def adaptive(values: Tensor, happened: Tensor) -> float:
        ordered = sorted(values.tolist())
        inner = [ordered[k * len(ordered) // bins] for k in range(1, bins)]
        return ece_by_loops(values, happened, [0.0, *inner, 1.0])

    assert m.ece(p, y, bins, adaptive=True) == pytest.approx(adaptive(confidence, label == y), abs=1e-12)
    each = [adaptive(p[:, c], y == c) for c in range(5)]
    assert m.ece(p, y, bins, adaptive=True, classwise=True) == pytest.approx(sum(each) / 5, abs=1e-12)


def test_ece_by_hand():
    """Ten forecasts of 0.8 and ten of 0.6; 5 and 6 of them right: ½ |0.5 − 0.8| + ½ |0.6 − 0.6|."""
    p = torch.tensor([[0.8, 0.2]] * 10 + [[0.6, 0.4]] * 10, dtype=torch.float64)
    y = torch.tensor([0] * 5 + [1] * 5 + [0] * 6 + [1] * 4)
    assert m.ece(p, y) == pytest.approx(0.15, abs=1e-12)
    assert m.ece(p, y, adaptive=True) == pytest.approx(0.15, abs=1e-12)
    assert m.ece(p, y, 1) == pytest.approx(0.15, abs=1e-12)
    assert m.ece(p, y, classwise=True) == pytest.approx(0.15, abs=1e-12)
    bins = m.reliability(p, y)
    assert_close(bins.confidence, torch.tensor([0.6, 0.8], dtype=torch.float64))
    assert_close(bins.accuracy, torch.tensor([0.6, 0.5], dtype=torch.float64))
    assert bins.count.tolist() == [10, 10]


def test_adaptive_bins_hold_equal_counts_and_keep_equal_confidences_together():
    p, y = classes(0, n=103)
    assert set(m.reliability(p, y, 10, adaptive=True).count.tolist()) == {10, 11}
    p = p.round(decimals=1)
    p[:, 0] += 1 - p.sum(-1)
    p, y = p[(p >= 0).all(-1)], y[(p >= 0).all(-1)]
    value = m.ece(p, y, 7, adaptive=True)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(1))
    assert m.ece(p[order], y[order], 7, adaptive=True) == pytest.approx(value, abs=1e-12)


def test_labels_drawn_from_the_probabilities_are_calibrated_and_others_are_not():
    g = torch.Generator().manual_seed(0)
    p = torch.softmax(1.5 * torch.randn(40_000, 4, generator=g, dtype=torch.float64), -1)
    y = torch.multinomial(p, 1, generator=g).squeeze(-1)
    # Σ_b n_b/n |mean of n_b centered indicators| ≤ Σ_b ½ √(n_b)/n on average; 5 of its standard deviations are above
    bins = m.reliability(p, y)
    bound = float(bins.count.sqrt().sum() / bins.count.sum()) * (0.5 + 5 * 0.5 / math.sqrt(len(bins.count)))
    assert m.ece(p, y) < bound
    sharper = p.square() / p.square().sum(-1, keepdim=True)
    assert m.ece(sharper, y) > 5 * bound


# -- real-valued -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_gaussian_crps_is_its_integral(seed):
    (mean, std), y = gaussians(seed, 4)

    def squared(t: float, i: int) -> float:
        return float((stats.norm.cdf(t, mean[i], std[i]) - (t >= float(y[i]))) ** 2)

    expected = []
    for i in range(4):
        ends = [float(mean[i] - 12 * std[i]), float(y[i]), float(mean[i] + 12 * std[i])]
        low, cut, high = min(ends[0], ends[1]), ends[1], max(ends[1], ends[2])
        parts = (
            integrate.quad(squared, a, b, args=(i,), epsabs=1e-12, limit=200)[0] for a, b in ((low, cut), (cut, high))
        )
        expected.append(sum(parts))
    assert_close(m.crps((mean, std), y, each=True), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


@pytest.mark.parametrize("seed", SEEDS)
def test_crps_of_draws_is_the_mean_over_all_pairs(seed):
    g = torch.Generator().manual_seed(seed)
    draws, y = torch.randn(7, 5, 2, generator=g).double() + 100, torch.randn(5, 2, generator=g).double() + 100
    pairs = torch.stack([(draws[i] - draws[j]).abs() for i, j in itertools.combinations(range(7), 2)]).mean(0)
    expected = (draws - y).abs().mean(0) - 0.5 * pairs
    assert_close(m.crps(draws, y, each=True), expected, rtol=0, atol=1e-10)


def test_crps_of_draws_estimates_the_gaussians():
    (mean, std), y = gaussians(0, 400)
    draws = mean + std * torch.randn(20, 400, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    error = m.paired(m.crps(draws, y, each=True), m.crps((mean, std), y, each=True))
    assert abs(error.value) < 5 * error.standard_error
    assert error.standard_error < 0.02


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("level", [0.5, 0.95])
def test_intervals_coverage_sharpness_and_pit_are_scipys(seed, level):
    (mean, std), y = gaussians(seed, 9, 3)
    low, high = stats.norm.interval(level, mean, std)
    got = m.interval((mean, std), level)
    assert_close(got[0], torch.as_tensor(low), rtol=0, atol=1e-10)
    assert_close(got[1], torch.as_tensor(high), rtol=0, atol=1e-10)
    assert m.coverage((mean, std), y, level) == ((low <= y.numpy()) & (y.numpy() <= high)).mean()
    assert m.sharpness((mean, std), level) == pytest.approx((high - low).mean(), abs=1e-10)
    assert_close(m.pit((mean, std), y), torch.as_tensor(stats.norm.cdf(y, mean, std)), rtol=0, atol=1e-12)


def test_intervals_of_draws_are_their_quantiles_and_pit_their_ranks():
    g = torch.Generator().manual_seed(0)
    draws, y = torch.randn(33, 6, generator=g).double(), torch.randn(6, generator=g).double()
    low, high = m.interval(draws, 0.7)
    assert_close(low, torch.quantile(draws, 0.15, dim=0), rtol=0, atol=1e-12)
    assert_close(high, torch.quantile(draws, 0.85, dim=0), rtol=0, atol=1e-12)
    expected = [stats.percentileofscore(draws[:, i], float(y[i]), "mean") / 100 for i in range(6)]
    assert_close(m.pit(draws, y), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)
    counts = torch.tensor([[0.0], [1.0], [1.0], [2.0]])
    assert m.pit(counts, torch.tensor([1.0])).item() == 0.5  # ties count half
    assert m.coverage(torch.ones(4, 1), torch.ones(1), 0.5) == 1  # an interval has its ends


def test_right_predictions_cover_as_they_say_and_their_pit_is_uniform():
    (mean, std), _ = gaussians(0, 20_000)
    y = mean + std * torch.randn(20_000, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    for level in (0.5, 0.9, 0.99):
        error = math.sqrt(level * (1 - level) / 20_000)
        assert abs(m.coverage((mean, std), y, level) - level) < 5 * error
    assert stats.kstest(m.pit((mean, std), y).numpy(), "uniform").pvalue > 1e-6
    assert stats.kstest(m.pit((mean, 1.3 * std), y).numpy(), "uniform").pvalue < 1e-6


# -- unknown inputs, and abstaining ------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("levels", [3, 10_000])  # many ties, none
def test_auroc_and_fpr95_are_those_of_scikit_learn(seed, levels):
    g = torch.Generator().manual_seed(seed)
    known = torch.randint(levels, (61,), generator=g).double()
    unknown = torch.randint(levels, (34,), generator=g).double() + levels // 3
    scores, is_known = torch.cat([known, unknown]), np.r_[np.ones(61), np.zeros(34)]
    assert m.auroc(known, unknown) == pytest.approx(sk.roc_auc_score(1 - is_known, scores), abs=1e-12)
    fpr, tpr, _ = sk.roc_curve(is_known, -scores, drop_intermediate=False)
    assert m.fpr95(known, unknown) == pytest.approx(fpr[tpr >= 0.95].min(), abs=1e-12)
    assert m.auroc(known, unknown) + m.auroc(unknown, known) == pytest.approx(1, abs=1e-12)


def test_auroc_and_fpr95_by_hand():
    known = torch.arange(20.0)
    assert m.auroc(known, torch.tensor([20.0, 21.0])) == 1
    assert m.auroc(known, known) == 0.5
    assert m.fpr95(known, torch.tensor([17.0, 18.0, 18.5, 19.0])) == 0.5  # 19 of 20 pass at 18
    assert m.fpr95(torch.zeros(4), torch.zeros(3)) == 1  # equal scores pass together


@pytest.mark.parametrize("seed", SEEDS)
def test_selective_risk_is_its_mean_over_all_orders_of_ties(seed):
    g = torch.Generator().manual_seed(seed)
    u, loss = torch.randint(3, (7,), generator=g).double(), torch.rand(7, generator=g).double()
    orders = [o for o in itertools.permutations(range(7)) if all(u[a] <= u[b] for a, b in itertools.pairwise(o))]
    risks = torch.stack([loss[list(o)].cumsum(0) / torch.arange(1, 8) for o in orders]).mean(0)
    got = m.selective_risk(u, loss)
    assert_close(got.risk, risks, rtol=0, atol=1e-12)
    assert_close(got.coverage, torch.arange(1, 8, dtype=torch.float64) / 7)
    assert m.aurc(u, loss) == pytest.approx(float(risks.mean()), abs=1e-12)
    assert float(got.risk[-1]) == pytest.approx(float(loss.mean()), abs=1e-12)


def test_aurc_is_least_where_uncertainty_orders_losses():
    loss = torch.rand(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert m.aurc(loss, loss) < m.aurc(torch.zeros(50), loss) < m.aurc(-loss, loss)
    assert m.aurc(torch.zeros(50), loss) == pytest.approx(float(loss.mean()), abs=1e-12)


# -- joint -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kappa", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("seed", SEEDS)
def test_joint_log_likelihood_is_that_of_loops(kappa, seed):
    g = torch.Generator().manual_seed(seed)
    p = torch.softmax(torch.randn(6, 13, 3, generator=g, dtype=torch.float64), -1)
    y = torch.randint(3, (13,), generator=g)
    anchors, counts = sets_of(13, kappa, None, torch.Generator().manual_seed(seed))
    expected = []
    for chosen, times in zip(anchors.tolist(), counts.tolist(), strict=True):
        products = [math.prod(float(p[s, i, y[i]]) ** t for i, t in zip(chosen, times, strict=True)) for s in range(6)]
        expected.append(math.log(sum(products) / 6))
    got = m.joint_log_likelihood(p, y, kappa, generator=torch.Generator().manual_seed(seed), each=True)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)
    assert m.joint_log_likelihood(p, y, kappa) == pytest.approx(
        float(m.joint_log_likelihood(p, y, kappa, each=True).mean())
    )


@pytest.mark.parametrize("kappa", [1, 2, 5])
def test_one_draw_gives_the_sum_of_its_log_probabilities(kappa):
    p, y = classes(0)
    anchors, counts = sets_of(len(y), kappa, None, None)
    each = -m.nll(p, y, each=True)
    expected = (counts * each[anchors]).sum(-1)
    assert_close(m.joint_log_likelihood(p[None], y, kappa, each=True), expected, rtol=0, atol=1e-10)


def test_one_anchor_gives_minus_the_nll_of_the_mean():
    g = torch.Generator().manual_seed(0)
    p, y = (
        torch.softmax(torch.randn(6, 13, 3, generator=g, dtype=torch.float64), -1),
        torch.randint(3, (13,), generator=g),
    )
    assert m.joint_log_likelihood(p, y, kappa=1) == pytest.approx(-m.nll(p.mean(0), y), abs=1e-10)


@pytest.mark.parametrize(("n", "kappa"), [(13, 1), (13, 2), (12, 3), (13, 5), (5, 5)])
def test_sets_use_every_input_and_draw_tau_times(n, kappa):
    anchors, counts = sets_of(n, kappa, None, None)
    assert anchors.shape == counts.shape == (-(-n // kappa), kappa)
    assert set(anchors.flatten().tolist()) == set(range(n))
    assert all(len(set(row)) == kappa for row in anchors.tolist())
    assert set(counts.sum(-1).tolist()) == {1 if kappa == 1 else 10 * (kappa - 1)}


def test_anchors_are_drawn_evenly():
    _, counts = sets_of(30_000, 3, 7, None)
    mean, spread = 7 / 3, math.sqrt(7 * (1 / 3) * (2 / 3))
    assert_close(counts.double().mean(0), torch.full((3,), mean).double(), rtol=0, atol=5 * spread / 100)
    assert float(counts.double().var()) == pytest.approx(spread**2, rel=0.05)


def test_an_anchor_not_drawn_does_not_count_even_if_impossible():
    log_probs = torch.tensor([[0.0, -math.inf]]).repeat(2, 1)
    values = m.dyadic(log_probs, kappa=2, tau=1)
    assert float(values) in (0.0, -math.inf)
    seen = {float(m.dyadic(log_probs, 2, 1, torch.Generator().manual_seed(s))) for s in range(20)}
    assert seen == {0.0, -math.inf}


def gaussian_outputs(likelihood: Any, seed: int = 0, n: int = 7, c: int = 2, joint: bool = True) -> lw.Prediction:
    g = torch.Generator().manual_seed(seed)
    root = torch.randn(n * c, n * c + 2, generator=g, dtype=torch.float64) / math.sqrt(n * c)
    cov = (root @ root.mT).reshape(n, c, n, c)
    mean = torch.randn(n, c, generator=g, dtype=torch.float64)
    return lw.Prediction(likelihood, lw.outputs.Normal(mean, cov, joint=joint))


@pytest.mark.parametrize("kappa", [1, 2, 3])
def test_joint_gaussian_is_scipys_multivariate_normal(kappa):
    pred = gaussian_outputs(lw.likelihoods.Gaussian(0.4))
    y = torch.randn(7, 2, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    anchors, counts = sets_of(7, kappa, None, None)
    expected = []
    for chosen, times in zip(anchors, counts, strict=True):
        i = chosen.repeat_interleave(times).tolist()
        k = len(i) * 2
        cov = pred.covariance[i][:, :, i].reshape(k, k).numpy() + 0.16 * np.eye(k)
        expected.append(stats.multivariate_normal.logpdf(y[i].flatten(), pred.f_mean[i].flatten(), cov))
    got = m.joint_log_likelihood(pred, y, kappa, each=True)
    assert_close(got, torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-8)


def test_joint_bernoulli_is_its_integral():
    """f = a + b z at every input, z standard normal: ∫ Π_i σ(±f_i)^{n_i} N(z) dz by Gauss and Hermite."""
    g = torch.Generator().manual_seed(0)
    a, b = (torch.randn(6, 1, generator=g, dtype=torch.float64) for _ in range(2))
    y = torch.randint(2, (6, 1), generator=g)
    pred = lw.Prediction(lw.likelihoods.Bernoulli(), lw.outputs.Normal(a, (b @ b.mT).reshape(6, 1, 6, 1), joint=True))
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    f = a + b * torch.as_tensor(nodes)  # (n, nodes)
    log_p = nn.functional.logsigmoid(torch.where(y == 1, f, -f))
    anchors, counts = sets_of(6, 3, 4, None)
    together = (counts.unsqueeze(-1) * log_p[anchors]).sum(1).exp()  # (sets, nodes)
    p = together @ torch.as_tensor(weights) / math.sqrt(2 * math.pi)
    second = together.square() @ torch.as_tensor(weights) / math.sqrt(2 * math.pi)
    got = m.joint_log_likelihood(pred, y, 3, 4, draws=20_000, each=True).exp()
    assert bool(((got - p).abs() < 5 * ((second - p**2) / 20_000).sqrt()).all())


def test_correlated_outputs_score_otherwise_than_independent_ones():
    p, y = classes(0, n=8, c=3, sharp=1.0)
    apart = torch.stack([p, p.flip(0)])
    assert m.joint_log_likelihood(apart, y, 2) != pytest.approx(
        m.joint_log_likelihood(apart.mean(0)[None], y, 2), abs=1e-3
    )


def test_all_kinds_of_prediction_get_the_samesets_of():
    """A Prediction that does not vary is a network without a posterior."""
    logits = torch.randn(7, 3, dtype=torch.float64)
    y = torch.randint(3, (7,))
    still = lw.Prediction(
        lw.likelihoods.Categorical(),
        lw.outputs.Normal(logits, torch.zeros(7, 3, 7, 3, dtype=torch.float64), joint=True),
    )
    drawn = lw.Prediction(lw.likelihoods.Categorical(), lw.outputs.Draws(logits.expand(5, 7, 3), logits))
    plain = m.joint_log_likelihood(torch.softmax(logits, -1)[None], y, 3, each=True)
    for pred in (still, drawn):
        assert_close(m.joint_log_likelihood(pred, y, 3, each=True), plain, rtol=0, atol=1e-10)
    with pytest.raises(InvalidValue, match="comes as draws"):
        m.joint_log_likelihood(drawn, y, 3, draws=4)
    with pytest.raises(InvalidValue, match="at least one"):
        m.joint_log_likelihood(still, y, 3, draws=0)
    with pytest.raises(InvalidValue, match="it is exact"):
        m.joint_log_likelihood(gaussian_outputs(lw.likelihoods.Gaussian(0.4)), torch.zeros(7, 2).double(), 3, draws=4)


# -- Predictions -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Broken(lw.likelihoods.Poisson):
    """NaN wherever f < 0."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.where(f[..., 0] < 0, math.nan, -f[..., 0])

    def cdf(self, f: Tensor, y: Tensor) -> Tensor:
        return torch.where(f < 0, math.nan, super().cdf(f, y))

    def sample(self, f: Tensor, generator: torch.Generator) -> Tensor:
        return torch.ones_like(f)


def test_nan_is_an_error_that_counts_and_never_a_score():
    f = torch.tensor([[-5.0], [5.0], [-4.0]], dtype=torch.float64)
    pred, y = (
        lw.Prediction(Broken(), lw.outputs.Normal(f, torch.full((3, 1, 1), 1e-6).double())),
        torch.ones(3, 1).double(),
    )
    with pytest.raises(InvalidValue, match="2 of 3 scores are NaN"):
        m.nll(pred, y)
    with pytest.raises(InvalidValue, match="2 of 3 scores are NaN"):
        m.nll(pred, y, each=True)
    with pytest.raises(InvalidValue, match="2 of 3 values of F are NaN"):
        m.pit(pred, y)
    p = torch.full((4, 2), 0.5).double()
    p[1] = math.nan
    with pytest.raises(InvalidValue, match="the probabilities hold 2 NaN or infinite values of 8"):
        m.nll(p, torch.zeros(4).long())


def test_what_had_no_probability_has_an_infinite_nll():
    """Minus infinity is a log-probability; by a Prediction as by a table."""
    f = torch.tensor([[0.0, 0.0], [0.0, -math.inf]], dtype=torch.float64)
    certain = lw.Prediction(Impossible(), lw.outputs.Normal(f.nan_to_num(neginf=-1.0), torch.zeros(2, 2, 2).double()))
    assert m.nll(certain, torch.tensor([1, 1]), each=True).tolist() == pytest.approx([math.log(2), math.inf])
    assert m.nll(f.softmax(-1), torch.tensor([1, 1])) == math.inf


@dataclasses.dataclass(frozen=True)
class Impossible(lw.likelihoods.Categorical):
    """Class 1 has no probability where its logit is −1 or less."""

    def log_prob(self, f: Tensor, y: Tensor) -> Tensor:
        return super().log_prob(torch.where(f <= -1, -math.inf, f), y)


def test_a_prediction_scores_as_its_parts_do(predictions):
    pred, y = predictions["categorical"]
    for metric in (m.nll, m.brier, m.accuracy, m.ece):
        assert metric(pred, y) == pytest.approx(metric(pred.probs, y), abs=1e-12)
    pred, y = predictions["bernoulli"]
    two = torch.stack([1 - pred.probs, pred.probs], -1)
    assert m.nll(pred, y, each=True).shape == (11,)
    assert_close(m.nll(pred, y, each=True), -pred.log_prob(y))  # labels depend on each other through f
    probit = dataclasses.replace(pred, link="probit")  # and not where a link gives their means
    both = torch.stack([1 - probit.probs, probit.probs], -1)
    assert_close(m.nll(probit, y, each=True), m.nll(both, y, each=True).sum(-1), rtol=0, atol=1e-10)
    for metric in (m.brier, m.accuracy, m.ece):
        assert metric(pred, y) == pytest.approx(metric(two, y), abs=1e-12)
        assert metric(pred, y.double()) == metric(pred, y)
    pred, y = predictions["gaussian"]
    pair = (pred.mean, pred.std)
    assert_close(m.nll(pred, y, each=True), -pred.log_prob(y))
    for regression in (m.crps, m.coverage):
        assert regression(pred, y) == pytest.approx(regression(pair, y), abs=1e-10)
    assert_close(m.pit(pred, y), m.pit(pair, y))
    assert m.sharpness(pred) == pytest.approx(m.sharpness(pair), abs=1e-10)


def test_a_prediction_by_draws_is_near_the_gaussian_that_they_are_of():
    g = torch.Generator().manual_seed(0)
    mean, y = (
        torch.randn(300, 1, generator=g, dtype=torch.float64),
        torch.randn(300, 1, generator=g, dtype=torch.float64),
    )
    f = mean + 0.7 * torch.randn(4_000, 300, 1, generator=g, dtype=torch.float64)
    drawn = lw.Prediction(lw.likelihoods.Gaussian(0.5), lw.outputs.Draws(f, mean))
    pair = (mean, torch.full_like(mean, math.hypot(0.7, 0.5)))
    assert m.crps(drawn, y) == pytest.approx(m.crps(pair, y), abs=0.01)
    assert_close(m.pit(drawn, y), m.pit(pair, y), rtol=0, atol=5 * 0.5 / math.sqrt(1024) + 0.04)
    assert m.sharpness(drawn) == pytest.approx(m.sharpness(pair), rel=0.03)
    assert m.coverage(drawn, y) == pytest.approx(m.coverage(pair, y), abs=0.03)


F = torch.tensor([[0.3, -1.0], [1.1, 0.2]], dtype=torch.float64)  # means of f, and their variances
V = torch.tensor([[0.2, 0.02], [0.3, 0.1]], dtype=torch.float64)
RANKED = {
    "student": (
        lw.likelihoods.StudentT(0.4, 2.5),
        lambda f, t: stats.t.cdf((t - f) / 0.4, 2.5),
        [[9.0, -1.1], [-0.5, 2]],
    ),
    "poisson": (lw.likelihoods.Poisson(), lambda f, t: stats.poisson.cdf(t, np.exp(f)), [[3.0, 0.0], [40.0, 1.0]]),
    "negative binomial": (
        lw.likelihoods.NegativeBinomial(1.5),
        lambda f, t: stats.nbinom.cdf(t, 1.5, 1.5 / (1.5 + np.exp(f))),
        [[0.0, 2.0], [7.0, 1.0]],
    ),
}


@pytest.mark.parametrize("name", RANKED)
def test_predictions_with_a_distribution_function_are_scored_by_it(name):
    """CRPS by SciPy's quadrature, or a sum over counts, of its distributions mixed over f on a fine grid; PIT there."""
    likelihood, cdf, y = RANKED[name]
    y = torch.tensor(y, dtype=torch.float64)
    pred = lw.Prediction(likelihood, lw.outputs.Normal(F, torch.diag_embed(V)))
    score, rank = m.crps(pred, y, each=True), m.pit(pred, y)
    z = np.linspace(-9, 9, 145)
    weight = np.exp(-0.5 * z**2) / np.exp(-0.5 * z**2).sum()
    for i, j in [(0, 0), (0, 1), (1, 0), (1, 1)]:
        f, at = float(F[i, j]) + math.sqrt(float(V[i, j])) * z, float(y[i, j])

        def mixed(t, f=f):
            return float(weight @ cdf(f, t))

        if likelihood.counts:
            k = np.arange(400)
            expected = ((weight @ cdf(f[:, None], k) - (at <= k)) ** 2).sum()
            below = 0.5 * (mixed(at) + mixed(at - 1))
        else:
            low, high = (
                integrate.quad(lambda t: mixed(t) ** 2, -np.inf, at, epsabs=1e-10, limit=400),
                integrate.quad(lambda t: (1 - mixed(t)) ** 2, at, np.inf, epsabs=1e-10, limit=400),
            )
            expected, below = low[0] + high[0], mixed(at)
        assert score[i, j].item() == pytest.approx(expected, rel=1e-6)
        assert rank[i, j].item() == pytest.approx(below, abs=1e-9)
    assert m.crps(pred, y) == pytest.approx(float(score.mean()))
    assert_close(m.crps(pred[1:], y[1:], each=True), score[1:], rtol=1e-7, atol=1e-7)


def test_predictions_without_an_integral_are_scored_by_draws():
    """Of f by draws the PIT is the mean over them; the CRPS of those, and of large counts, is that of draws of y."""
    draws = F + V.sqrt() * torch.randn(500, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    drawn = lw.Prediction(lw.likelihoods.Gaussian(0.3), lw.outputs.Draws(draws, F))
    assert_close(m.pit(drawn, F + 1), torch.special.ndtr((F + 1 - draws) / 0.3).mean(0))
    assert m.crps(drawn, F + 1) == m.crps(drawn.sample(1024), F + 1)
    many = lw.Prediction(lw.likelihoods.Poisson(), lw.outputs.Normal(F + 8, torch.diag_embed(V)))
    y = (F + 8).exp().round()
    assert m.crps(many, y) == m.crps(many.sample(1024), y)


def test_a_score_that_is_infinite_is_an_error():
    pred = lw.Prediction(lw.likelihoods.StudentT(0.4, 0.45), lw.outputs.Normal(F, torch.diag_embed(V)))
    with pytest.raises(lw.errors.NotConverged, match="infinite"):
        m.crps(pred, F)


def test_metrics_leave_the_random_state_and_the_graph_alone(predictions):
    pred, y = predictions["categorical"]
    before = torch.get_rng_state()
    p = pred.probs.clone().requires_grad_()
    assert not m.nll(p, y, each=True).requires_grad
    m.ece(p, y), m.joint_log_likelihood(p[None], y)
    assert torch.equal(before, torch.get_rng_state())


def test_float32_and_half_precision_probabilities_are_taken():
    p, y = classes(0)
    assert m.nll(p.float(), y) == pytest.approx(m.nll(p, y), abs=1e-5)
    assert m.brier(p.half(), y) == pytest.approx(m.brier(p, y), abs=1e-2)
    wide = torch.softmax(torch.randn(20, 1000), -1).bfloat16()
    assert math.isfinite(m.ece(wide, torch.arange(20)))


# -- pictures ----------------------------------------------------------------------------------------------------


def test_reliability_and_selective_risk_plot_themselves(tmp_path):
    p, y = classes(0)
    m.reliability(p, y).plot().savefig(tmp_path / "reliability.png")
    m.selective_risk(1 - p.amax(-1), 1 - m.accuracy(p, y, each=True)).plot().savefig(tmp_path / "risk.png")
    assert all((tmp_path / name).stat().st_size > 5000 for name in ("reliability.png", "risk.png"))


def test_a_plot_without_matplotlib_names_the_extra(monkeypatch):
    p, y = classes(0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    for made in (m.reliability(p, y), m.selective_risk(p[:, 0], p[:, 1])):
        with pytest.raises(Unsupported, match=r"lapwing\[demo\]"):
            made.plot()


# -- bad input ---------------------------------------------------------------------------------------------------

P, Y = classes(0, n=6, c=3)
G, T = gaussians(0, 6)
BAD: dict[str, tuple[Any, str]] = {
    "logits": (lambda: m.nll(torch.randn(6, 3), Y), "sum to one"),
    "negative": (lambda: m.brier(torch.tensor([[1.5, -0.5]]), torch.tensor([0])), "negative"),
    "one class left out": (lambda: m.ece(P[:, :2], Y.clamp(max=1)), "sum to one"),
    "nan": (lambda: m.nll(P * math.nan, Y), "NaN"),
    "empty": (lambda: m.ece(P[:0], Y[:0]), "empty"),
    "binary p": (lambda: m.nll(P[:, 0], Y), "torch.stack"),
    "one column": (lambda: m.nll(torch.ones(6, 1), Y * 0), "c ≥ 2"),
    "label shape": (lambda: m.nll(P, Y[:4]), "labels of shape"),
    "one-hot labels": (lambda: m.brier(P, nn.functional.one_hot(Y, 3)), "labels of shape"),
    "float labels": (lambda: m.accuracy(P, Y.double()), "integers"),
    "label range": (lambda: m.accuracy(P, Y + 3), "outside 0..2"),
    "strings": (lambda: m.nll(P.numpy().astype(str), Y), "encode it as numbers"),
    "a list of strings": (lambda: m.nll(P, ["a"] * len(Y)), "a list of numbers, got list"),
    "no bins": (lambda: m.ece(P, Y, 0), "bins"),
    "zero std": (lambda: m.crps((G[0], G[1] * 0), T), "positive"),
    "std shape": (lambda: m.nll((G[0], G[1][:3]), T), "one each"),
    "three things": (lambda: m.nll((*G, T), T), "pair"),
    "target shape": (lambda: m.coverage(G, T[:3]), "targets of shape"),
    "target dimension": (lambda: m.crps((G[0][:, None].expand(-1, 2), G[1][:, None].expand(-1, 2)), T), "unsqueeze"),
    "nan target": (lambda: m.pit(G, T * math.nan), "NaN"),
    "infinite mean": (lambda: m.sharpness((G[0] / 0, G[1])), "infinite"),
    "level": (lambda: m.coverage(G, T, 95), "between 0 and 1"),
    "one draw": (lambda: m.crps(G[0][None], T), "s ≥ 2"),
    "draws alone": (lambda: m.crps(G[0], T), "s ≥ 2"),
    "only known": (lambda: m.auroc(G[0], G[0][:0]), "unknown inputs are empty"),
    "only unknown": (lambda: m.fpr95(G[0][:0], G[0]), "known inputs are empty"),
    "nan score": (lambda: m.auroc(G[0] * math.nan, G[0]), r"known inputs hold \d+ NaN"),
    "scores an output": (lambda: m.auroc(P, P), "one number an example"),
    "losses too few": (lambda: m.aurc(G[0], G[1][:2]), "6 uncertainties and 2 losses"),
    "unpaired": (lambda: m.paired(G[0], G[1][:2]), "same examples"),
    "infinite pair": (lambda: m.paired(G[0] / 0, G[1]), "infinite"),
    "two examples": (lambda: m.paired(G[0][:2], G[1][:2]), "at least"),
    "one table": (lambda: m.joint_log_likelihood(P, Y), r"\(s, n, c\)"),
    "joint label shape": (lambda: m.joint_log_likelihood(P[None], Y[:3]), r"\(s, n, c\)"),
    "kappa": (lambda: m.joint_log_likelihood(P[None], Y, 7), "kappa"),
    "no kappa": (lambda: m.joint_log_likelihood(P[None], Y, 0), "kappa"),
    "draws of draws": (lambda: m.joint_log_likelihood(P[None], Y, 2, draws=9), "comes as draws"),
    "tau": (lambda: m.joint_log_likelihood(P[None], Y, 2, 0), "tau"),
    "nan log-probabilities": (lambda: m.dyadic(P * math.nan, 2), "NaN"),
    "log-probabilities shape": (lambda: m.dyadic(P[None], 2), r"\(s, n\)"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_named(case):
    call, message = BAD[case]
    with pytest.raises(InvalidValue, match=message):
        call()


def test_a_prediction_of_another_kind_is_refused(predictions):
    real, y = predictions["gaussian"]
    of_classes, labels = predictions["categorical"]
    for metric in (m.brier, m.accuracy, m.ece, m.reliability):
        with pytest.raises(Unsupported, match="no classes"):
            metric(real, y)
    for metric in (m.crps, m.coverage, m.pit):
        with pytest.raises(Unsupported, match="is of classes"):
            metric(of_classes, labels)
    with pytest.raises(Unsupported, match="is of classes"):
        m.sharpness(of_classes)
    with pytest.raises(InvalidValue, match="its entropy"):
        m.auroc(of_classes, of_classes)
    with pytest.raises(InvalidValue, match="joint=True"):
        m.joint_log_likelihood(of_classes, labels)
    with pytest.raises(InvalidValue, match="joint=False"):
        m.nll(gaussian_outputs(lw.likelihoods.Gaussian(0.4)), torch.zeros(7, 2, dtype=torch.float64))
    half, binary = predictions["bernoulli"]
    with pytest.raises(InvalidValue, match="0 or 1"):
        m.brier(half, binary * 0.5)
