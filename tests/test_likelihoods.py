"""Each likelihood against autograd of its own log_prob, against torch.distributions, and against its own samples.

A new likelihood joins by one more entry in CASES: how it is made, how outputs and targets are drawn, and what
torch.distributions calls it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, distributions
from torch.func import grad, hessian, vmap

from helpers import close, seeded
from lapwing.curvature.factor import Factor, output_factor
from lapwing.errors import InvalidValue, LapwingError, Unsupported
from lapwing.likelihoods import Bernoulli, Categorical, Gaussian, Likelihood

Z = 5.0  # standard errors
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Case:
    make: Callable[[], Likelihood]
    outputs: int
    reference: Callable[[Any, Tensor], distributions.Distribution]  # over one example's y
    one_hot: bool = False  # y is a label, its mean a vector of probabilities

    def draw(self, n: int, seed: int) -> tuple[Likelihood, Tensor, Tensor]:
        """The likelihood, f (n, c) and y drawn from it."""
        likelihood, generator = self.make(), seeded(seed)
        f = 2 * torch.randn(n, self.outputs, generator=generator, dtype=torch.float64)
        return likelihood, f, likelihood.sample(f, generator)


def normal(likelihood: Any, f: Tensor) -> distributions.Distribution:
    return distributions.Independent(distributions.Normal(f, likelihood.noise.expand(f.shape)), 1)


CASES = {
    "gaussian": Case(lambda: Gaussian(0.7), 3, normal),
    "gaussian, one output": Case(lambda: Gaussian(1.6), 1, normal),
    "gaussian, noise per output": Case(lambda: Gaussian(torch.tensor([0.3, 1.0, 2.5])), 3, normal),
    "categorical": Case(Categorical, 4, lambda _, f: distributions.Categorical(logits=f), one_hot=True),
    "categorical, two classes": Case(Categorical, 2, lambda _, f: distributions.Categorical(logits=f), one_hot=True),
    "bernoulli": Case(
        Bernoulli, 3, lambda _, f: distributions.Independent(distributions.Bernoulli(logits=f), 1)
    ),
    "bernoulli, one output": Case(
        Bernoulli, 1, lambda _, f: distributions.Independent(distributions.Bernoulli(logits=f), 1)
    ),
}  # fmt: skip
SINGLE_WEIGHT = [name for name in CASES if "per output" not in name]


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


# -- densities -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_log_prob_is_that_of_torch_distributions(case: Case, seed: int) -> None:
    likelihood, f, y = case.draw(6, seed)
    found = likelihood.log_prob(f, y)
    assert found.shape == (6,)
    close(found, case.reference(likelihood, f).log_prob(y))


def test_log_prob_can_be_traced(case: Case) -> None:
    """By vmap and by hessian, one example at a time: no validation inside."""
    likelihood, f, y = case.draw(5, 0)
    each = vmap(lambda f, y: likelihood.log_prob(f[None], y[None])[0])(f, y)
    close(each, likelihood.log_prob(f, y))
    assert vmap(hessian(lambda f, y: likelihood.log_prob(f[None], y[None])[0]))(f, y).shape == (
        5,
        f.shape[1],
        f.shape[1],
    )


def test_log_likelihood_from_sums_is_the_sum_of_log_prob(case: Case) -> None:
    """The sums are taken once, at unit or any other hyperparameters; they add over batches."""
    likelihood, f, y = case.draw(7, 0)
    parts = [likelihood.statistics(f[i], y[i]) for i in (slice(0, 3), slice(3, 7))]
    sums = {k: parts[0][k] + parts[1][k] for k in parts[0]}
    for factor in (1.0, 0.1, 3.0):
        other = likelihood.replace(**{k: factor * v for k, v in likelihood.hyperparameters.items()})
        close(other.log_likelihood(sums), other.log_prob(f, y).sum())


def test_log_likelihood_is_differentiable_in_the_hyperparameters(case: Case) -> None:
    likelihood, f, y = case.draw(7, 0)
    sums = likelihood.statistics(f, y)
    for name, value in likelihood.hyperparameters.items():
        moving = value.clone().requires_grad_()
        moved = likelihood.replace(**{name: moving})
        ours, theirs = (
            torch.autograd.grad(t, moving)[0] for t in (moved.log_likelihood(sums), moved.log_prob(f, y).sum())
        )
        close(ours, theirs)


def test_sums_are_float64_for_float32_outputs(case: Case) -> None:
    likelihood, f, y = case.draw(7, 0)
    y = y.float() if y.is_floating_point() else y
    sums = likelihood.statistics(f.float(), y)
    assert all(v.dtype == torch.float64 for v in sums.values())
    exact = likelihood.log_prob(f.float().double(), y.double() if y.is_floating_point() else y).sum()
    close(likelihood.log_likelihood(sums), exact)


# -- derivatives, at unit scale --------------------------------------------------------------------------------------


def weights_per_column(likelihood: Likelihood, S: Tensor) -> Tensor:
    """w for each column of S, (k,)."""
    w = likelihood.curvature_weights()
    return w.expand(S.shape[-1]) if len(w) == 1 else w


@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_hessian_root_is_the_hessian_of_log_prob(case: Case, seed: int) -> None:
    """−∂²_f log p = Σ_j w_j S_j S_jᵀ."""
    likelihood, f, y = case.draw(6, seed)
    S = likelihood.hessian_root(f)
    assert S.shape[:2] == f.shape
    found = (S * weights_per_column(likelihood, S)) @ S.mT
    close(found, -vmap(hessian(lambda f, y: likelihood.log_prob(f[None], y[None])[0]))(f, y))


@pytest.mark.parametrize("seed", SEEDS)
def test_weighted_score_is_the_gradient_of_log_prob(case: Case, seed: int) -> None:
    """At unit scale: a Gaussian's score is the residual, and its weight 1/σ² turns it into the gradient."""
    likelihood, f, y = case.draw(6, seed)
    exact = vmap(grad(lambda f, y: likelihood.log_prob(f[None], y[None])[0]))(f, y)
    close(likelihood.score(f, y) * likelihood.curvature_weights().expand(f.shape[-1]), exact)


@pytest.mark.parametrize("seed", SEEDS)
def test_unit_log_prob_times_weights_has_the_derivatives_of_log_prob(case: Case, seed: int) -> None:
    """∂² log p = Σ_g w_g ∂² of column g, and the same for ∂: they differ by a constant in f."""
    likelihood, f, y = case.draw(6, seed)
    w = likelihood.curvature_weights("hessian")
    assert likelihood.unit_log_prob(f, y).shape == (6, len(w))

    def unit(f: Tensor, y: Tensor) -> Tensor:
        return (w * likelihood.unit_log_prob(f[None], y[None])[0]).sum()

    def exact(f: Tensor, y: Tensor) -> Tensor:
        return likelihood.log_prob(f[None], y[None])[0]

    close(vmap(grad(unit))(f, y), vmap(grad(exact))(f, y))
    close(vmap(hessian(unit))(f, y), vmap(hessian(exact))(f, y))


def test_the_curvature_weights_carry_the_gradient_of_the_noise() -> None:
    for noise in (torch.tensor(0.7, dtype=torch.float64), torch.tensor([0.7, 1.1], dtype=torch.float64)):
        sigma = noise.clone().requires_grad_()
        for kind, power in [("exact", -2), ("hessian", -2), ("empirical", -4), ("monte_carlo", -2)]:
            if kind in ("empirical", "monte_carlo") and noise.ndim:
                continue
            w = Gaussian(sigma).curvature_weights(kind)
            close(w, noise.reshape(-1) ** power)
            close(torch.autograd.grad(w.sum(), sigma)[0], power * noise ** (power - 1))


# -- identity 11: the Gauss-Newton matrix is the Fisher ----------------------------------------------------------------


def every_target(case: Case, likelihood: Likelihood, f: Tensor) -> tuple[Tensor, Tensor]:
    """All values of y for one f, (v, ...), and their probabilities, (v,)."""
    if case.one_hot:
        y = torch.arange(f.shape[-1])
    else:
        y = torch.cartesian_prod(*[torch.tensor([0.0, 1.0], dtype=f.dtype)] * f.shape[-1]).reshape(-1, f.shape[-1])
    return y, likelihood.log_prob(f.expand(len(y), -1), y).exp()


@pytest.mark.parametrize("name", [n for n in CASES if "gaussian" not in n])
def test_gauss_newton_is_fisher(name: str) -> None:
    """S Sᵀ = E_{y~p}[score scoreᵀ], summed over every y there is."""
    case = CASES[name]
    likelihood, f, _ = case.draw(4, 0)
    for row in f:
        y, p = every_target(case, likelihood, row)
        close(p.sum(), torch.ones((), dtype=torch.float64))
        score = likelihood.score(row.expand(len(y), -1), y)
        S = likelihood.hessian_root(row[None])[0]
        close(score.mT @ (p[:, None] * score), S @ S.mT)
        close(p @ score, torch.zeros_like(row))  # a score has mean zero


@pytest.mark.parametrize("name", SINGLE_WEIGHT)
def test_monte_carlo_factors_are_unbiased(name: str) -> None:
    """E[w S Sᵀ] = Λ: within Z standard errors, every entry, over independent factors."""
    likelihood, f, y = CASES[name].draw(3, 0)
    f = f / 2  # nothing so rare that the draws could miss it
    repeats, samples, generator = 400, 4, seeded(1)
    S = torch.stack(
        [output_factor(Factor("monte_carlo", samples), likelihood, f, y, generator) for _ in range(repeats)]
    )
    assert S.shape == (repeats, *f.shape, samples)
    w = likelihood.curvature_weights("monte_carlo")
    found = w * S @ S.mT
    root = likelihood.hessian_root(f)
    exact = likelihood.curvature_weights() * root @ root.mT
    error = found.std(0) / math.sqrt(repeats)
    assert float(((found.mean(0) - exact).abs() / error.clamp(min=1e-12)).max()) < Z


@pytest.mark.parametrize("name", SINGLE_WEIGHT)
def test_monte_carlo_factors_converge_at_the_square_root(name: str) -> None:
    """16 times the samples: a quarter of the root mean square error."""
    likelihood, f, y = CASES[name].draw(8, 0)
    root = likelihood.hessian_root(f)
    exact, generator = root @ root.mT, seeded(1)

    def rms(samples: int) -> float:
        factor = Factor("monte_carlo", samples)
        draws = [output_factor(factor, likelihood, f, y, generator) for _ in range(48)]
        return float(torch.stack([S @ S.mT - exact for S in draws]).square().mean().sqrt())

    assert 3.2 < rms(4) / rms(64) < 4.8


def test_monte_carlo_factors_do_not_depend_on_the_noise() -> None:
    """Curvature is kept at unit scale: tuning the noise needs no second pass."""
    f, y = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    factor = Factor("monte_carlo", 2)
    a, b = (output_factor(factor, Gaussian(noise), f, y, seeded(0)) for noise in (0.1, 10.0))
    assert torch.equal(a, b)


@pytest.mark.parametrize("name", SINGLE_WEIGHT)
def test_the_empirical_factor_is_the_score(name: str) -> None:
    """w S Sᵀ = ∂log p ∂log pᵀ."""
    likelihood, f, y = CASES[name].draw(5, 0)
    S = output_factor(Factor("empirical"), likelihood, f, y, seeded(0))
    gradient = vmap(grad(lambda f, y: likelihood.log_prob(f[None], y[None])[0]))(f, y)
    found = likelihood.curvature_weights("empirical") * S @ S.mT
    close(found, gradient.unsqueeze(-1) * gradient.unsqueeze(-2))


def test_the_exact_factor_is_the_hessian_root(case: Case) -> None:
    likelihood, f, y = case.draw(5, 0)
    assert torch.equal(output_factor(Factor("exact"), likelihood, f, y, seeded(0)), likelihood.hessian_root(f))


def test_noise_per_output_refuses_factors_that_mix_outputs() -> None:
    likelihood = Gaussian(torch.tensor([0.5, 1.0]))
    for kind in ("monte_carlo", "empirical"):
        with pytest.raises(Unsupported, match="factor='exact'"):
            likelihood.curvature_weights(kind)


# -- moments of y ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_mean_and_variance_are_those_of_samples(case: Case, seed: int) -> None:
    likelihood, f, _ = case.draw(3, seed)
    f = f / 2  # nothing so rare that 4,000 draws could miss it
    n, generator = 4000, seeded(seed)
    y = likelihood.sample(f.expand(n, *f.shape), generator)
    y = torch.nn.functional.one_hot(y, f.shape[-1]).double() if case.one_hot else y
    mean, variance = likelihood.mean(f), likelihood.variance(f)
    assert mean.shape == variance.shape == f.shape
    assert float(((y.mean(0) - mean) / (variance / n).sqrt()).abs().max()) < Z
    squares = (y - mean).square()
    error = squares.std(0) / math.sqrt(n)
    assert float(((squares.mean(0) - variance) / error).abs().max()) < Z


def test_mean_and_variance_are_those_of_torch_distributions(case: Case) -> None:
    likelihood, f, _ = case.draw(5, 0)
    reference = case.reference(likelihood, f)
    if case.one_hot:
        reference = distributions.OneHotCategorical(logits=f)
    close(likelihood.mean(f), reference.mean)
    close(likelihood.variance(f), reference.variance)
    stacked = f.expand(2, *f.shape)  # any leading shape
    assert likelihood.mean(stacked).shape == likelihood.variance(stacked).shape == stacked.shape


def test_samples_come_from_the_generator_alone(case: Case) -> None:
    likelihood, f, _ = case.draw(20, 0)
    before = torch.random.get_rng_state()
    a, b, c = (likelihood.sample(f, seeded(seed)) for seed in (1, 1, 2))
    assert torch.equal(a, b)
    assert not torch.equal(a, c)
    assert torch.equal(torch.random.get_rng_state(), before)


# -- softmax -----------------------------------------------------------------------------------------------------------


def test_a_common_shift_of_logits_is_a_null_direction() -> None:
    likelihood, f, y = CASES["categorical"].draw(6, 0)
    S = likelihood.hessian_root(f)
    close(torch.ones(4, dtype=torch.float64) @ S, torch.zeros(6, 3, dtype=torch.float64))  # c − 1 columns do
    close(likelihood.score(f, y).sum(-1), torch.zeros(6, dtype=torch.float64))
    assert torch.linalg.matrix_rank(S).tolist() == [3] * 6
    close(likelihood.log_prob(f + 5.0, y), likelihood.log_prob(f, y))


@pytest.mark.parametrize("name", ["categorical", "bernoulli"])
def test_sure_outputs_are_finite(name: str) -> None:
    """Logits of a thousand: no NaN, no infinity, no curvature."""
    likelihood = CASES[name].make()
    f = 1000 * torch.eye(CASES[name].outputs, dtype=torch.float64)
    y = torch.arange(len(f)) if CASES[name].one_hot else torch.eye(len(f), dtype=torch.float64)
    for value in (likelihood.log_prob(f, y), likelihood.score(f, y), likelihood.hessian_root(f), likelihood.mean(f)):
        assert bool(torch.isfinite(value).all())
    for value in (likelihood.log_prob(-f, y), likelihood.score(-f, y), likelihood.hessian_root(-f)):
        assert bool(torch.isfinite(value).all())
    S = likelihood.hessian_root(f[:1])
    if CASES[name].one_hot:
        close(S @ S.mT, torch.zeros_like(S @ S.mT))


# -- hyperparameters ---------------------------------------------------------------------------------------------------


def test_hyperparameters_are_named_float64_tensors() -> None:
    assert Gaussian(0.1).noise.dtype == torch.float64
    assert float(Gaussian(0.1).noise) == 0.1  # not float32's
    assert Gaussian(torch.tensor([0.5, 1.0], dtype=torch.float32)).noise.dtype == torch.float64
    assert list(Gaussian(0.3).hyperparameters) == ["noise"]
    assert Categorical().hyperparameters == Bernoulli().hyperparameters == {}
    assert [make().name for make in (Gaussian, Categorical, Bernoulli)] == ["gaussian", "categorical", "bernoulli"]


def test_replace_gives_a_new_object_and_keeps_gradients() -> None:
    old = Gaussian(0.3)
    moving = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    new = old.replace(noise=moving)
    assert float(old.noise) == 0.3
    assert new.noise.requires_grad
    with pytest.raises(AttributeError):
        old.noise = 1.0  # type: ignore[misc]


@pytest.mark.parametrize(
    "noise", [0.0, -1.0, math.nan, math.inf, torch.tensor([1.0, 0.0]), torch.ones(2, 2), torch.ones(0)]
)
def test_a_noise_that_is_no_standard_deviation_is_refused(noise: Any) -> None:
    with pytest.raises(InvalidValue, match="noise"):
        Gaussian(noise)


def test_residual_noise_is_the_maximum_likelihood_one() -> None:
    for noise in (1.0, torch.ones(3)):
        _, f, y = CASES["gaussian"].draw(9, 0)
        likelihood = Gaussian(noise)
        sums = likelihood.statistics(f, y)
        best = likelihood.residual_noise(sums).requires_grad_()
        assert best.shape == likelihood.noise.shape
        close(torch.autograd.grad(likelihood.replace(noise=best).log_likelihood(sums), best)[0], torch.zeros_like(best))


def test_the_target_scale_is_their_standard_deviation() -> None:
    _, f, y = CASES["gaussian"].draw(9, 0)
    y = y * torch.tensor([1.0, 10.0, 0.0]) + torch.tensor([0.0, 3.0, 7.0])
    sums = Gaussian().statistics(f, y)
    each = y.std(0, correction=0)
    close(
        Gaussian(torch.ones(3)).target_scale(sums), torch.stack([each[0], each[1], torch.ones((), dtype=torch.float64)])
    )
    close(Gaussian().target_scale(sums), each.square().mean().sqrt())


# -- what validate refuses -------------------------------------------------------------------------------------------

F2 = torch.zeros(4, 2, dtype=torch.float64)
REFUSED: list[tuple[Likelihood, Tensor, Tensor, str]] = [
    (Gaussian(), F2, torch.zeros(4, 2).long(), "floating point, got torch.int64"),
    (Gaussian(), F2, torch.zeros(4, 1), r"\(4, 1\) do not match outputs \(4, 2\)"),
    (Gaussian(), F2[:, :1], torch.zeros(4), r"y\.unsqueeze\(-1\)"),
    (Gaussian(), F2, torch.full((4, 2), math.nan), "NaN or infinite"),
    (Gaussian(), F2, torch.full((4, 2), -math.inf), "NaN or infinite"),
    (Gaussian(torch.ones(3)), F2, torch.zeros(4, 2), "3 values for 2 outputs"),
    (Categorical(), F2[:, :1], torch.zeros(4).long(), "'bernoulli'"),
    (Categorical(), F2, torch.zeros(4), r"y\.long\(\)"),
    (Categorical(), F2, torch.zeros(4, dtype=torch.bool), "bool"),
    (Categorical(), F2, torch.zeros(4, 2).long(), r"labels of shape \(4,\)"),
    (Categorical(), F2, torch.zeros(4, 1).long(), r"labels of shape \(4,\)"),
    (Categorical(), F2, torch.tensor([0, 1, 2, 0]), r"from 0 to 2, outside 0\.\.1"),
    (Categorical(), F2, torch.tensor([0, 1, -100, 0]), r"from -100 to 1, outside 0\.\.1"),
    (Bernoulli(), F2, torch.zeros(4), r"\(4,\) do not match outputs \(4, 2\)"),
    (Bernoulli(), F2[:, :1], torch.zeros(4), r"y\.unsqueeze\(-1\)"),
    (Bernoulli(), F2, torch.full((4, 2), 0.5), "0 or 1"),
    (Bernoulli(), F2, torch.full((4, 2), math.nan), "0 or 1"),
    (Bernoulli(), F2, torch.full((4, 2), 2), "0 or 1"),
]


@pytest.mark.parametrize(("likelihood", "f", "y", "text"), REFUSED)
def test_targets_that_cannot_be_are_refused(likelihood: Likelihood, f: Tensor, y: Tensor, text: str) -> None:
    with pytest.raises(InvalidValue, match=text) as caught:
        likelihood.validate(f, y)
    assert isinstance(caught.value, LapwingError)
    assert isinstance(caught.value, ValueError)


def test_targets_that_can_be_are_taken(case: Case) -> None:
    likelihood, f, y = case.draw(5, 0)
    likelihood.validate(f, y)
    if isinstance(likelihood, Bernoulli):
        for dtype in (torch.bool, torch.long, torch.float32):
            likelihood.validate(f, y.to(dtype))
            close(likelihood.log_prob(f, y.to(dtype)), likelihood.log_prob(f, y))
            close(likelihood.score(f, y.to(dtype)), likelihood.score(f, y))
    if isinstance(likelihood, Categorical):
        for dtype in (torch.uint8, torch.int32):
            likelihood.validate(f, y.to(dtype))
            close(likelihood.log_prob(f, y.to(dtype)), likelihood.log_prob(f, y))
            close(likelihood.score(f, y.to(dtype)), likelihood.score(f, y))
    if isinstance(likelihood, Gaussian):
        likelihood.validate(f, y.float())


def test_no_label_is_passed_over_by_the_categorical() -> None:
    """−100 means "ignore" to PyTorch's cross-entropy."""
    f = torch.randn(2, 3, dtype=torch.float64)
    with pytest.raises(IndexError, match="out of bounds"):
        Categorical().log_prob(f, torch.tensor([-100, 1]))
    y = torch.tensor([[2, 0], [1, 1], [0, 2]])
    many = torch.randn(3, 2, 3, dtype=torch.float64)
    expected = torch.log_softmax(many, -1).gather(-1, y.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(Categorical().log_prob(many, y), expected)
