"""LaplaceModel.of_data: its evidence and posterior are those of dense algebra on tanh features written out here."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close, normal, seeded
from lapwing.errors import InvalidValue, Unsupported

botorch = pytest.importorskip("botorch", reason="needs BoTorch: pip install 'lapwing[botorch]'")

from botorch.acquisition.analytic import LogExpectedImprovement  # noqa: E402
from botorch.models import ModelList  # noqa: E402
from botorch.models.transforms import Normalize, Standardize  # noqa: E402
from botorch.optim import optimize_acqf  # noqa: E402
from botorch.sampling import SobolQMCNormalSampler  # noqa: E402

from lapwing.integrations import surrogate as module  # noqa: E402
from lapwing.integrations.botorch import LaplaceModel  # noqa: E402

CUBE = torch.tensor([[0.0, 0.0], [1.0, 1.0]], dtype=torch.float64)


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few units, so that J is not wider than need be."""
    monkeypatch.setattr(module, "WIDTH", 12)


def points(n: int, d: int = 2, seed: int = 0) -> Tensor:
    return torch.rand(n, d, dtype=torch.float64, generator=seeded(seed))


def outcomes(X: Tensor) -> Tensor:
    return 5 + 3 * torch.sin(4 * X[:, :1]) + X[:, 1:2].square()


def kernel(net: Any, scale: Tensor, precision: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """J (D²/λ) Jᵀ of f = Σ v tanh(w·u + b) + c, by hand."""
    w, bias, v = net[0].weight, net[0].bias, net[2].weight[0]

    def rows(x: Tensor) -> Tensor:
        u = scale * (2 * x - 1)
        t = torch.tanh(u @ w.mT + bias)
        slope = v * (1 - t.square())  # ∂f/∂(w·u + b), (n, W)
        by_w = (slope.unsqueeze(2) * u.unsqueeze(1)).flatten(1)
        return torch.cat([by_w, module.BIAS * slope, t / len(v) ** 0.5], 1) / precision.sqrt()

    return (rows(a) @ rows(b).mT + module.CONSTANT**2).detach()


def hyperparameters(model: LaplaceModel) -> tuple[Tensor, Tensor, Tensor, Any]:
    la = model.la
    net = la.tangent.model
    precision = la.prior.hyperparameters["precision"][0]
    return net[0].scale, precision, la.likelihood.hyperparameters["noise"].square(), net[1:]


def dense(model: LaplaceModel, X: Tensor, Y: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """The mean and covariance of a Gaussian process with that kernel, of standardized outcomes."""
    scale, precision, variance, net = hyperparameters(model)
    K = kernel(net, scale, precision, X, X) + variance * torch.eye(len(X)).double()
    k = kernel(net, scale, precision, x, X)
    mean = k @ torch.linalg.solve(K, Y)
    return mean, kernel(net, scale, precision, x, x) - k @ torch.linalg.solve(K, k.mT)


@pytest.mark.usefixtures("narrow")
def test_the_evidence_is_that_of_the_features() -> None:
    X, y = points(7, 3), normal(7, 1)
    net = module.network(3, seeded(0))
    scale, noise = torch.tensor([0.5, 2.0, 1.0]).double(), torch.tensor(0.2, dtype=torch.float64)
    plain = kernel(net, scale, torch.ones(()), X, X) - module.CONSTANT**2
    K = plain / plain.diagonal().mean() + module.CONSTANT**2 + 0.2**2 * torch.eye(7).double()
    expected = torch.distributions.MultivariateNormal(torch.zeros(7).double(), K).log_prob(y.squeeze(1))
    close(module.ProcessEvidence(net, X, y).log_evidence(scale, noise), expected)


@pytest.mark.usefixtures("narrow")
def test_the_evidence_of_the_fit_is_that_of_the_search() -> None:
    X = points(8)
    y = Standardize(1)(outcomes(X))[0]
    la = module.surrogate(X, y, seeded(0))
    scale, precision, variance, net = hyperparameters(LaplaceModel(la, "process"))
    close(la.log_evidence(), module.ProcessEvidence(net, X, y).log_evidence(scale, variance.sqrt()), 1e-6)
    close((kernel(net, scale, precision, X, X) - module.CONSTANT**2).diagonal().mean(), torch.ones(()).double())
    assert la.center == "process"
    assert la.tuning is not None
    assert la.tuning.converged


@pytest.mark.usefixtures("narrow")
def test_the_slopes_of_the_search_are_differences() -> None:
    X, y = points(7, 3), normal(7, 1)
    search = module.ProcessEvidence(module.network(3, seeded(0)), X, y)
    values = {"scale": torch.tensor([0.5, 2.0, 1.0]), "noise": torch.tensor(0.2)}
    values = {name: value.double() for name, value in values.items()}
    found, slopes = search(values)
    logs = {name: value.log() for name, value in values.items()}
    close(found, search.log_evidence(**values) + module.log_prior(logs))
    for name, value in values.items():
        for j in range(value.numel()):
            ends = []
            for h in (1e-5, -1e-5):
                step = torch.zeros_like(value)
                step.view(-1)[j] = h
                ends.append(float(search({**values, name: value * step.exp()})[0]))
            close(slopes[name].reshape(-1)[j], torch.tensor((ends[0] - ends[1]) / 2e-5).double(), 1e-6)


@pytest.mark.usefixtures("narrow")
def test_the_search_holds_the_priors_of_its_hyperparameters() -> None:
    """log p(s) + log p(σ) are log-normal densities, but for a constant."""

    def expected(logs: dict[str, Tensor]) -> Tensor:
        of_scale = torch.distributions.Normal(math.log(module.SCALE / 3**0.5), 1.0)
        of_noise = torch.distributions.Normal(-5.0, 1.0)
        return of_scale.log_prob(logs["scale"]).sum() + of_noise.log_prob(logs["noise"])

    one = {"scale": normal(3), "noise": torch.tensor(-3.0).double()}
    two = {"scale": normal(3, seed=1), "noise": torch.tensor(-6.0).double()}
    close(module.log_prior(one) - module.log_prior(two), expected(one) - expected(two))


@pytest.mark.usefixtures("narrow")
def test_the_posterior_is_the_process_of_the_features() -> None:
    X, x = points(8), points(5, seed=1)
    Y = outcomes(X)
    model = LaplaceModel.of_data(X, Y)
    mean, cov = dense(model, X, (Y - Y.mean()) / Y.std(), x)
    found = model.posterior(x)
    close(found.mean, Y.mean() + Y.std() * mean, 1e-6)
    close(found.distribution.covariance_matrix, Y.std() ** 2 * cov, 1e-6)


@pytest.mark.usefixtures("narrow")
def test_conditioning_is_the_process_on_more_data() -> None:
    X, more, x = points(8), points(3, seed=2), points(5, seed=1)
    Y, new = outcomes(X), outcomes(more)
    model = LaplaceModel.of_data(X, Y)
    both = (torch.cat([Y, new]) - Y.mean()) / Y.std()
    mean, cov = dense(model, torch.cat([X, more]), both, x)
    found = model.condition_on_observations(more, new).posterior(x)
    close(found.mean, Y.mean() + Y.std() * mean, 1e-6)
    close(found.distribution.covariance_matrix, Y.std() ** 2 * cov, 1e-5)
    fantasies = model.fantasize(more, SobolQMCNormalSampler(torch.Size([4]), seed=0))
    assert fantasies.posterior(x).mean.shape == (4, 5, 1)


@pytest.mark.usefixtures("narrow")
def test_gradients_in_points_are_differences() -> None:
    X = points(8)
    model = LaplaceModel.of_data(X, outcomes(X))

    def value(x: Tensor) -> Tensor:
        found = model.posterior(x)
        return found.mean.sum() + found.distribution.covariance_matrix.square().sum()

    assert torch.autograd.gradcheck(value, (points(3, seed=1).requires_grad_(),))


@pytest.mark.usefixtures("narrow")
def test_transforms_are_those_of_hand_made_data() -> None:
    raw, x = 5 + 3 * points(8), points(4, seed=1)
    low, high = raw.amin(0), raw.amax(0)
    unit = (raw - low) / (high - low)
    Y = outcomes(unit)
    model = LaplaceModel.of_data(raw, Y, input_transform=Normalize(2), outcome_transform=Standardize(1))
    plain = LaplaceModel.of_data(unit, Y)
    close(model.posterior(low + (high - low) * x).mean, plain.posterior(x).mean)
    close(model.posterior(low + (high - low) * x).variance, plain.posterior(x).variance)


def test_an_input_that_does_nothing_has_a_small_scale() -> None:
    X = points(16, 3)
    model = LaplaceModel.of_data(X, torch.sin(6 * X[:, 1:2]))
    scale = model.la.tangent.model[0].scale
    assert float(scale[1]) > 5 * float(scale[[0, 2]].max())


@pytest.mark.parametrize("seed", [0, 1])
def test_error_bars_hold_a_smooth_function(seed: int) -> None:
    X, x = points(12, seed=seed), points(200, seed=9)
    found = LaplaceModel.of_data(X, outcomes(X), generator=seeded(seed)).posterior(x)
    away = (found.mean - outcomes(x)).abs() / found.variance.sqrt()
    assert float((away < 3).double().mean()) > 0.95
    assert float(found.variance.sqrt().mean()) < 0.5 * float(outcomes(x).std())


def test_optimization_finds_the_highest_point() -> None:
    X = points(5)
    value = lambda x: -(x - torch.tensor([0.3, 0.7])).square().sum(-1, keepdim=True)  # noqa: E731
    for _ in range(9):
        model = LaplaceModel.of_data(X, value(X))
        torch.manual_seed(0)
        new, _ = optimize_acqf(LogExpectedImprovement(model, value(X).max()), CUBE, 1, num_restarts=3, raw_samples=32)
        X = torch.cat([X, new])
    assert float(value(X).max()) > -5e-3  # of as many random points 2e-2 is to be expected


@pytest.mark.usefixtures("narrow")
def test_weights_are_those_of_the_generator() -> None:
    X, x = points(8), points(4, seed=1)
    state = torch.random.get_rng_state()
    first, again, other = (LaplaceModel.of_data(X, outcomes(X), generator=g) for g in (None, seeded(0), seeded(1)))
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.posterior(x).mean, again.posterior(x).mean)
    assert not torch.equal(first.posterior(x).mean, other.posterior(x).mean)


@pytest.mark.usefixtures("narrow")
def test_a_model_is_made_where_gradients_are_off() -> None:
    X, x = points(8), points(4, seed=1)
    with torch.no_grad():
        found = LaplaceModel.of_data(X, outcomes(X)).posterior(x)
    close(found.mean, LaplaceModel.of_data(X, outcomes(X)).posterior(x).mean)


@pytest.mark.usefixtures("narrow")
def test_outcomes_are_modeled_one_by_one() -> None:
    X = points(8)
    with pytest.raises(InvalidValue, match=r"got \(8, 2\) and \(8, 2\); of several outcomes"):
        LaplaceModel.of_data(X, X)
    with pytest.raises(InvalidValue, match=r"got list and \(8, 1\)"):
        LaplaceModel.of_data([1.0], X[:, :1])  # type: ignore[arg-type]
    several = ModelList(*(LaplaceModel.of_data(X, X[:, j : j + 1]) for j in range(2)))
    assert several.posterior(points(3, seed=1)).mean.shape == (3, 2)


def test_points_outside_of_the_unit_cube_are_told() -> None:
    from botorch.exceptions import InputDataWarning

    X = 5 + 3 * points(8)
    with pytest.warns(InputDataWarning, match="unit cube"):
        LaplaceModel.of_data(X, outcomes(X))


def test_a_missing_library_is_named_with_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lapwing.integrations.botorch.FantasizeMixin", object)
    with pytest.raises(Unsupported, match=r"needs BoTorch.*'lapwing\[botorch\]'"):
        LaplaceModel.of_data(points(3), points(3)[:, :1])
