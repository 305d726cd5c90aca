"""What every prior promises: its density, its local Gaussian, its draws, its groups, and what the search asks."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, distributions, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import close
from lapwing.errors import InvalidValue, Unsupported
from lapwing.operators import Diagonal
from lapwing.priors import Gaussian, GPrior, Prior
from lapwing.tangent import linearize
from lapwing.tree import Layout


def layout_of(model: nn.Module) -> Layout:
    return linearize(model.double()).layout


def at(prior: Prior, layout: Layout) -> dict[str, Tensor]:
    """The group of each element of each parameter."""
    assert prior.index is not None
    return layout.unflatten(prior.index)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: int) -> None:
        super().__init__()
        self.body = kind(2, 3, **options)
        self.head = nn.Linear(3, 1)


# -- groups ----------------------------------------------------------------------------------------------------------


def test_one_group_an_input_column() -> None:
    layout = layout_of(nn.Sequential(nn.Conv1d(3, 2, 2), nn.Linear(4, 5)))
    prior = Gaussian(1.0, per="input").bind(layout)
    found = at(prior, layout)
    assert prior.names[:4] == ("0.weight[:, 0]", "0.weight[:, 1]", "0.weight[:, 2]", "0.bias")
    assert len(prior.names) == 3 + 1 + 4 + 1
    assert torch.equal(found["0.weight"], torch.arange(3)[None, :, None].expand(2, 3, 2))
    assert torch.equal(found["1.weight"], 4 + torch.arange(4).expand(5, 4))
    assert found["1.bias"].tolist() == [8] * 5


@pytest.mark.parametrize(("kind", "letters"), [(nn.LSTM, "ifgo"), (nn.GRU, "rzn")])
def test_one_group_a_gate(kind: type[nn.RNNBase], letters: str) -> None:
    """A gate's rows of all four parameters of a layer share; a layer's other parameters are as per='layer'."""
    layout = layout_of(Recurrent(kind, num_layers=2))
    prior = Gaussian(1.0, per="gate").bind(layout)
    found, k = at(prior, layout), len(letters)
    assert prior.names == (*(f"body_l{n}[{g}]" for n in (0, 1) for g in letters), "head")
    for name in ("weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"):
        blocks = found[f"body.{name}"].reshape(k, 3, -1)
        assert torch.equal(blocks, (k + torch.arange(k))[:, None, None].expand(blocks.shape))
    assert found["head.weight"].unique().tolist() == [2 * k]


def test_a_projected_lstm_has_its_gates_too() -> None:
    layout = layout_of(Recurrent(nn.LSTM, proj_size=2).requires_grad_(True))
    found = at(Gaussian(1.0, per="gate").bind(layout), layout)
    assert torch.equal(found["body.weight_hh_l0"][:, 0], torch.arange(4).repeat_interleave(3))
    assert found["body.weight_hr_l0"].unique().tolist() == [4]


def test_gates_need_a_recurrent_layer() -> None:
    with pytest.raises(InvalidValue, match="per='layer'"):
        Gaussian(1.0, per="gate").bind(layout_of(nn.Linear(2, 3)))


def checkered(name: str, shape: torch.Size) -> Tensor:
    return 7 * (torch.arange(shape.numel()).reshape(shape) % 2)


def test_a_callable_numbers_the_groups() -> None:
    layout = layout_of(nn.Linear(3, 2))
    prior = Gaussian(torch.tensor([1.0, 4.0]), per=checkered).bind(layout)
    assert prior.named() == {"0": 1.0, "7": 4.0}
    assert prior.operator().dense().tolist() == [1, 4, 1, 4, 1, 4, 1, 4]


@pytest.mark.parametrize("bad", [lambda n, s: torch.zeros(s), lambda n, s: torch.zeros(1, dtype=torch.int64), len])
def test_a_callable_must_give_integers_for_each_weight(bad: object) -> None:
    with pytest.raises((InvalidValue, TypeError)):
        Gaussian(1.0, per=bad).bind(layout_of(nn.Linear(3, 2)))


def test_groups_of_a_callable_are_saved(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = nn.Linear(3, 2).double(), torch.randn(9, 3).double()
    la = lw.laplace(model, (x, torch.randn(9, 2).double()), "gaussian", prior=Gaussian(2.0, per=checkered)).tuned()
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", model)
    assert back.prior.named() == la.prior.named()
    close(back.predict(x).f_var, la.predict(x).f_var, 1e-14)


# -- the Gaussians ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["all", "layer", "unit", "input", "weight"])
def test_the_density_of_a_gaussian_under_vmap(per: str) -> None:
    layout = layout_of(nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 4)))
    prior = Gaussian(2.5, per=per, mean=0.3).bind(layout)
    v = torch.randn(5, layout.size, dtype=torch.float64)
    found = torch.func.vmap(prior.log_prob)(layout.unflatten(v))
    mean, deviation = torch.tensor([0.3, 2.5**-0.5], dtype=torch.float64)
    close(found, distributions.Normal(mean, deviation).log_prob(v).sum(-1), 1e-12)


@pytest.mark.parametrize("per", ["all", "layer", "unit", "input", "weight"])
def test_a_gaussian_keeps_the_laws_of_priors(per: str) -> None:
    lw.testing.check_prior(Gaussian(2.5, per=per, mean=0.3))


@pytest.mark.parametrize("seed", [0, 1])
def test_gaussians_of_several_values_keep_the_laws_of_priors(seed: int) -> None:
    for prior in (Gaussian({"0.*": 0.5, "2.*": 3.0}), Gaussian(torch.tensor([2.0, 5.0]), per="layer", mean=0.2)):
        lw.testing.check_prior(prior, seed=seed)


def test_draws_have_the_moments_of_the_prior() -> None:
    model, n = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)), 20_000
    draws = Gaussian(torch.tensor([4.0, 0.25]), per="layer", mean=1.0).draw(model, n)
    assert draws.keys() == dict(model.named_parameters()).keys()
    for (name, w), deviation in zip(draws.items(), (0.5, 0.5, 2.0, 2.0), strict=True):
        assert w.dtype == torch.float32
        assert w.shape == (n, *model.get_parameter(name).shape)
        assert abs(float(w.mean()) - 1) < 5 * deviation / n**0.5
        assert abs(float(w.std()) / deviation - 1) < 5 / (2 * n) ** 0.5


def test_a_gprior_draws_where_it_has_seen_a_curvature() -> None:
    torch.manual_seed(1)
    model = nn.Linear(3, 2)
    with pytest.raises(InvalidValue, match="not seen a curvature"):
        GPrior().draw(model)
    la = lw.laplace(model, (torch.randn(9, 3), torch.randn(9, 2)), "gaussian", prior="gprior")
    flat = la.state.layout.flatten(la.prior.draw(la.state.layout, 20_000), batch_dims=1)
    assert_close(flat.var(0) * la.prior.operator().dense(), torch.ones(8).double(), rtol=0.06, atol=0)


@pytest.mark.parametrize("bad", ["model", None, 3])
def test_draw_takes_a_network(bad: object) -> None:
    with pytest.raises(InvalidValue, match=r"torch.nn.Module or a layout"):
        Gaussian(1.0).draw(bad)


def test_a_prior_without_a_sampler_refuses_to_draw_by_name() -> None:
    class Flat(Prior):
        pass

    with pytest.raises(Unsupported, match="Flat has no draws"):
        Flat().draw(nn.Linear(2, 1))


# -- a prior that is no Gaussian -------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Laplacian(Prior):
    """w ~ Laplace(0, b)."""

    scale: Any = 1.0
    per: Any = "all"

    def log_prob(self, weights: Any) -> Tensor:
        b = self.each(self.scale)
        return -(self.vector(weights).abs() / b + (2 * b).log()).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        return Diagonal(1 / (self.each(self.scale) * v.abs()), len(v)), torch.zeros_like(v)

    def sample(self, n: int, generator: torch.Generator) -> Tensor:
        b = self.each(self.scale)
        u = torch.rand((n, len(b)), generator=generator, dtype=torch.float64) - 0.5
        return -b * u.sign() * torch.log1p(-2 * u.abs())


@dataclass(frozen=True, eq=False)
class Plain(Prior):
    """N(0, 1/λ) by the contract's least: what it inherits must be what `Gaussian` has in closed form."""

    rate: Any = 1.0
    per: Any = "all"

    def log_prob(self, weights: Any) -> Tensor:
        a = self.each(self.rate)
        return 0.5 * ((a / (2 * math.pi)).log() - a * self.vector(weights).square()).sum()

    def quadratic(self, v: Tensor) -> tuple[Diagonal, Tensor]:
        return Diagonal(self.each(self.rate), len(v)), torch.zeros_like(v)


def data(seed: int = 0, n: int = 12, inputs: int = 3, outputs: int = 2) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, inputs, generator=generator, dtype=torch.float64)
    y = torch.randn(n, outputs, generator=generator, dtype=torch.float64)
    model = nn.Sequential(nn.Linear(inputs, 2), nn.Tanh(), nn.Linear(2, outputs)).double()
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))
    return model, x, y


OWN = [Laplacian(0.7), Laplacian(0.7, per="unit"), Laplacian({"0.*": 0.5, "2.*": 3.0}), Plain()]


@pytest.mark.parametrize("prior", OWN)
def test_priors_of_ones_own_keep_the_laws_of_priors(prior: Prior) -> None:
    lw.testing.check_prior(prior)


def test_the_density_of_a_laplacian_is_torchs() -> None:
    layout = layout_of(nn.Linear(3, 2))
    prior = Laplacian(torch.tensor([0.5, 3.0]), per="unit").bind(layout)
    v = torch.randn(4, layout.size, dtype=torch.float64)
    b = torch.tensor([0.5] * 3 + [3.0] * 3 + [0.5, 3.0], dtype=torch.float64)
    want = distributions.Laplace(torch.zeros_like(b), b).log_prob(v).sum(-1)
    close(torch.func.vmap(prior.log_prob)(layout.unflatten(v)), want, 1e-12)


def test_draws_of_a_laplacian_have_its_moments() -> None:
    n = 20_000
    w = Laplacian(0.7).draw(nn.Linear(3, 2), n)["weight"]
    assert abs(float(w.abs().mean()) - 0.7) < 5 * 0.7 / (6 * n) ** 0.5
    assert abs(float(w.mean())) < 5 * 0.7 * (2 / (6 * n)) ** 0.5


@pytest.mark.parametrize("w", [-2.0, 0.3, 1.0])
@pytest.mark.parametrize("b", [0.5, 2.0])
def test_the_quadratic_of_a_laplacian_is_the_mean_precision_of_its_mixture(w: float, b: float) -> None:
    """E[1/s | w] by the integral over s, whose prior is exponential with mean 2b²."""
    log_s = torch.linspace(-12, 12, 40_001, dtype=torch.float64)
    s = log_s.exp()
    density = (-0.5 * w**2 / s - s / (2 * b**2)).exp() / s.sqrt() * s  # ds = s d log s
    want = (density / s).sum() / density.sum()
    prior = Laplacian(b).bind(layout_of(nn.Linear(1, 1, bias=False)))
    close(prior.quadratic(torch.tensor([w], dtype=torch.float64))[0].dense(), want.reshape(1), 1e-8)


@pytest.mark.parametrize("structure", ["full", "block", "diag"])
@pytest.mark.parametrize("per", ["all", "layer"])
def test_the_evidence_by_the_contract_is_that_of_the_gaussian(structure: str, per: str) -> None:
    model, x, y = data()
    ours, same = (
        lw.laplace(model, (x, y), "gaussian", structure=structure, prior=prior)
        for prior in (Gaussian(2.5, per=per), Plain(2.5, per=per))
    )
    for a, b in zip(vars(ours.decompose()).values(), vars(same.decompose()).values(), strict=True):
        assert a == b if isinstance(a, str) or a is None else abs(float(a - b)) < 1e-10
    close(ours.effective_dimension(), same.effective_dimension(), 1e-10)
    close(ours.predict(x).f_var, same.predict(x).f_var, 1e-10)
    found, again = (la.tuned(method="evidence", center="map") for la in (ours, same))
    close(again.prior.rate.reshape(-1), found.prior.precision.reshape(-1), 1e-3)
    close(again.log_evidence(), found.log_evidence(), 1e-6)


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_evidence_of_a_laplacian_against_dense_algebra(seed: int) -> None:
    model, x, y = data(seed)
    b, noise = 0.8, 0.6
    la = lw.laplace(model, (x, y), lw.likelihoods.Gaussian(noise), structure="full", prior=Laplacian(b))
    params = {k: p.detach() for k, p in model.named_parameters()}
    jac = torch.func.jacrev(lambda p: torch.func.functional_call(model, p, (x,)))(params)
    rows = torch.cat([j.reshape(y.numel(), -1) for j in jac.values()], 1)
    theta = torch.cat([p.reshape(-1) for p in params.values()])
    precision = rows.mT @ rows / noise**2 + torch.diag(1 / (b * theta.abs()))
    fit = distributions.Normal(model(x).detach(), torch.full_like(y, noise)).log_prob(y).sum()
    density = distributions.Laplace(torch.zeros_like(theta), torch.full_like(theta, b)).log_prob(theta).sum()
    want = fit + density + 0.5 * len(theta) * math.log(2 * math.pi) - 0.5 * torch.logdet(precision)
    close(la.log_evidence(), want, 1e-10)
    spread = torch.einsum("rp,pq,rq->r", rows, torch.linalg.inv(precision), rows)
    close(la.predict(x).f_var.reshape(-1), spread, 1e-8)


def test_tuning_a_laplacian_ends_where_the_evidence_is_flat() -> None:
    model, x, y = data(3)
    la = lw.laplace(model, (x, y), "gaussian", structure="full", prior=Laplacian(0.3, per="layer"))
    tuned = la.tuned(center="map", fixed="noise")
    assert tuned.tuning is not None
    assert tuned.tuning.converged
    assert not tuned.tuning.at_bound
    assert float(tuned.log_evidence()) > float(la.log_evidence())
    for g in range(2):
        for step in (0.99, 1.01):
            scale = tuned.prior.scale.clone()
            scale[g] *= step
            assert float(tuned.log_evidence(prior=tuned.prior.replace(scale=scale))) < float(tuned.log_evidence())


def test_both_prior_and_noise_are_tuned() -> None:
    model, x, y = data(4)
    tuned = lw.laplace(model, (x, y), "gaussian", prior=Laplacian()).tuned(center="map")
    assert set(tuned.prior.hyperparameters) | set(tuned.likelihood.hyperparameters) == {"scale", "noise"}
    assert float(tuned.prior.scale) != 1
    assert float(tuned.likelihood.noise) != 1
    assert "prior scale" in repr(tuned)


def test_the_posterior_of_two_weights_by_quadrature() -> None:
    """Where the data say much, log Z is the integral of likelihood and prior over both weights, by a grid."""
    x = torch.linspace(-1, 1, 400, dtype=torch.float64).unsqueeze(-1)
    features = torch.cat([x, x.square()], 1)
    model = nn.Linear(2, 1, bias=False).double()
    y = features @ torch.tensor([[0.8], [-1.2]], dtype=torch.float64) + 0.1 * torch.sin(40 * x)
    sharp = torch.linalg.lstsq(features, y).solution
    with torch.no_grad():
        model.weight.copy_(sharp.mT)
    la = lw.laplace(model, (features, y), lw.likelihoods.Gaussian(0.1), structure="full", prior=Laplacian(0.9))
    line = torch.linspace(-0.15, 0.15, 301, dtype=torch.float64)
    grid = torch.cartesian_prod(line, line) + sharp.reshape(-1)
    fit = distributions.Normal(y.mT, torch.full_like(y.mT, 0.1)).log_prob(grid @ features.mT).sum(-1)
    density = distributions.Laplace(torch.zeros(2).double(), torch.full((2,), 0.9).double()).log_prob(grid).sum(-1)
    want = torch.logsumexp(fit + density, 0) + 2 * torch.log(line[1] - line[0])
    close(la.log_evidence(), want, 5e-3)


def test_what_needs_a_gaussian_refuses_others_by_name(tmp_path: Path) -> None:
    model, x, y = data()
    la = lw.laplace(model, (x, y), "gaussian", prior=Laplacian())
    for call in (
        la.tuned,
        la.recentered,
        lambda: la.tuned(method="mackay", center="map"),
        lambda: la.tuned(method="validation", data=(x, y)),
        lambda: lw.laplace(model, (x, y), "gaussian", structure="kron", prior=Laplacian()).predict(x),
    ):
        with pytest.raises(Unsupported, match=r"Laplacian|element-wise"):
            call()
    with pytest.raises(Unsupported, match="Laplacian"):
        lw.OnlineEvidence(model, (x, y), "gaussian", prior=Laplacian())


def test_a_weight_that_is_zero_is_named() -> None:
    model, x, y = data()
    with torch.no_grad():
        model.get_parameter("2.bias")[0] = 0
    with pytest.raises(InvalidValue, match=r"1 of 14 weights, the first in 2\.bias"):
        lw.laplace(model, (x, y), "gaussian", prior=Laplacian()).predict(x)


def test_a_laplacian_is_saved_compared_and_merged(tmp_path: Path) -> None:
    model, x, y = data()
    la = lw.laplace(model, (x, y), "gaussian", prior=Laplacian(per="layer")).tuned(center="map", fixed="noise")
    la.save(tmp_path / "la.safetensors")
    back = lw.load(tmp_path / "la.safetensors", model)
    assert torch.equal(back.prior.scale, la.prior.scale)
    assert float(back.log_evidence()) == float(la.log_evidence())
    other = la.replace(prior=1.0).tuned(center="map", fixed="noise")
    found = {row.name: row for row in lw.compare({"laplacian": la, "gaussian": other}).rows}
    assert found["laplacian"].log_evidence == float(la.log_evidence())
    assert 0 < found["laplacian"].effective_dimension < 14
    fit = partial(lw.laplace, likelihood="gaussian", structure="diag", prior=Laplacian(0.5))
    halves, whole = [fit(model, part) for part in ((x[:5], y[:5]), (x[5:], y[5:]))], fit(model, (x, y))
    close(lw.merge(halves).log_evidence(), whole.log_evidence())
    with pytest.raises(InvalidValue, match=r"scale 0\.5"):
        lw.merge([halves[0], halves[1].replace(prior=Laplacian(0.7))])


def test_held_out_data_choose_the_scale_of_a_prior_that_says_how() -> None:
    @dataclass(frozen=True, eq=False)
    class Scaled(Laplacian):
        def scaled(self, c: float) -> Scaled:
            return self.replace(scale=self.scale.detach() / c)

    model, x, y = data()
    la = lw.laplace(model, (x, y), "gaussian", prior=Scaled())
    away = model(x).detach() + 1.4 * torch.randn(y.shape, generator=torch.Generator().manual_seed(0)).double()
    found = la.tuned(method="validation", data=(x, away), fixed="noise")
    held_out = [-float(one.predict(x).log_prob(away).mean()) for one in (la, found)]
    assert held_out[1] < held_out[0]
    assert float(found.prior.scale) != 1


def test_coordinates_lead_back_to_the_prior() -> None:
    layout = layout_of(data()[0])
    for prior in (Gaussian({"0.*": 0.5, "2.*": 3.0}), Laplacian({"0.*": 0.5, "2.*": 3.0}), Laplacian(2.0)):
        bound = prior.bind(layout)
        for name, value in bound.moved(bound.coordinates()).hyperparameters.items():
            close(value, bound.hyperparameters[name], 1e-14)
    assert Laplacian({"0.*": 0.5, "2.*": 3.0}).bind(layout).named() == {"0.*": 0.5, "2.*": 3.0}


@pytest.mark.parametrize("bad", [-1.0, 0.0, float("nan"), "wide", torch.tensor([1.0, -2.0]), {}])
def test_a_hyperparameter_is_positive(bad: Any) -> None:
    with pytest.raises(InvalidValue, match="scale"):
        Laplacian(bad)


def test_a_name_that_prior_and_likelihood_share_is_refused() -> None:
    @dataclass(frozen=True, eq=False)
    class Noisy(Plain):
        noise: Any = 1.0

    model, x, y = data()
    with pytest.raises(InvalidValue, match="both call a hyperparameter"):
        lw.laplace(model, (x, y), "gaussian", prior=Noisy()).tuned(center="map")


@pytest.mark.parametrize("prior", [Gaussian(2.0, per="layer"), GPrior(2.0, per="layer"), GPrior(3.0)])
def test_a_balanced_prior_gives_each_group_the_variance_asked_for(prior: Gaussian) -> None:
    """Σ_{i in g} [JᵀJ]_ii / A_ii, the prior variance of all outputs in sum, is the same for every group."""
    model, x, y = data(5)
    bound = lw.laplace(model, (x, y), "gaussian", prior=prior).prior
    squares = torch.rand(14, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 0.1
    moved = bound.moved(bound.balanced(squares, 7.0))
    spread = moved.groups().sums(squares / moved.quadratic(squares)[0].dense())
    close(spread, torch.full_like(spread, 7.0))
