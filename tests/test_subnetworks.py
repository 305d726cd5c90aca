"""Subnetworks: which weights a selection picks, and that the posterior over a mask S is the dense one, H_SS + A_SS.

The oracle is J by reverse mode, one output at a time, and Λ in closed form; nothing of the package is in it.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg

Oracle = Callable[..., Tensor]
NOISE, PRIOR = 0.7, 1.3
EXACT = {"full (primal)": lw.curvature.Full("primal"), "full (dual)": lw.curvature.Full("dual")}
STRUCTURES = {**EXACT, "kron": "kron", "block": "block", "diag": "diag"}


def flat(model: nn.Module, masks: dict[str, Tensor]) -> Tensor:
    """Masks as one vector over all parameters, (p,)."""
    parts = [masks.get(n, torch.zeros(p.shape, dtype=torch.bool)) for n, p in model.named_parameters()]
    return torch.cat([m.reshape(-1) for m in parts])


def theta(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def curvature(jacobian: Oracle, model: nn.Module, x: Tensor, likelihood: str) -> Tensor:
    """H = Σ JᵀΛJ over all parameters, (p, p)."""
    J = jacobian(model, lambda m: m(x))
    if likelihood == "gaussian":
        return torch.einsum("nca,ncb->ab", J, J) / NOISE**2
    p = model(x).detach().softmax(-1)
    Lambda = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
    return torch.einsum("nca,ncd,ndb->ab", J, Lambda, J)


def blocks(model: nn.Module, chosen: Tensor) -> Tensor:
    """Which entries (p, p) lie in one part: a whole layer's weight and bias together, a masked parameter by itself."""
    label, start, marks = [], 0, {}
    for name, p in model.named_parameters():
        whole = bool(chosen[start : start + p.numel()].all())
        key = name.rpartition(".")[0] if whole else name
        label.append(torch.full((p.numel(),), marks.setdefault(key, len(marks))))
        start += p.numel()
    index = torch.cat(label)
    return index[:, None] == index


def log_lik(model: nn.Module, x: Tensor, y: Tensor, likelihood: str) -> Tensor:
    f = model(x).detach()
    if likelihood == "gaussian":
        return (-0.5 * ((y - f) / NOISE).square() - math.log(NOISE) - 0.5 * math.log(2 * math.pi)).sum()
    return f.log_softmax(-1).gather(1, y[:, None]).sum()


def likelihood_of(name: str) -> Any:
    return lw.likelihoods.Gaussian(NOISE) if name == "gaussian" else lw.likelihoods.Categorical()


@pytest.fixture
def problem(mlp: nn.Module, regression: Any, classification: Any) -> dict[str, Any]:
    return {"gaussian": (mlp, *regression), "categorical": (mlp, *classification)}


# -- selections ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 7, 39, 0.01, 0.5, 1.0])
def test_selections_have_the_size_asked_for(mlp: nn.Module, regression: Any, k: int | float) -> None:
    size = k if isinstance(k, int) else max(1, round(k * 39))
    la = lw.laplace(mlp, regression, "gaussian", structure="diag")
    for masks in (
        lw.subsets.random(mlp, k),
        lw.subsets.largest_magnitude(mlp, k),
        lw.subsets.largest_variance(la, k),
    ):
        assert int(flat(mlp, masks).sum()) == size == lw.linearize(mlp, masks).layout.size
        assert all(m.dtype == torch.bool and m.shape == mlp.get_parameter(n).shape for n, m in masks.items())


def test_the_largest_are_no_smaller_than_the_rest(mlp: nn.Module) -> None:
    chosen, size = flat(mlp, lw.subsets.largest_magnitude(mlp, 12)), theta(mlp).abs()
    assert size[chosen].min() > size[~chosen].max()


@pytest.mark.parametrize("prior", [2.0, {"0.*": 50.0, "2.*": 0.1}])
def test_variance_is_that_of_the_diagonal_posterior(
    mlp: nn.Module, regression: Any, jacobian: Oracle, prior: Any
) -> None:
    la = lw.laplace(mlp, regression, likelihood_of("gaussian"), structure="diag", prior=prior)
    A = torch.full((39,), 2.0) if prior == 2.0 else torch.cat([torch.full((24,), 50.0), torch.full((15,), 0.1)])
    variance = 1 / (curvature(jacobian, mlp, regression[0], "gaussian").diagonal() + A)
    chosen = flat(mlp, lw.subsets.largest_variance(la, 9))
    assert variance[chosen].min() > variance[~chosen].max()


def test_variance_along_a_run_is_that_of_the_snapshots(mlp: nn.Module) -> None:
    swag, snapshots = lw.subsets.Swag(mlp), []
    for step in range(6):
        with torch.no_grad():
            for i, p in enumerate(mlp.parameters()):
                p += 1e4 * (step == 0) + 0.01 * (i + 1) * torch.randn_like(p)  # far from zero: squares would cancel
        swag.update()
        snapshots.append(theta(mlp))
    want = torch.stack(snapshots).var(0, correction=0)
    assert_close(swag.variance(), want, rtol=1e-8, atol=1e-14)
    assert_close(swag.mean, torch.stack(snapshots).mean(0))
    chosen = flat(mlp, lw.subsets.largest_variance(swag, 10))
    assert want[chosen].min() > want[~chosen].max()


def test_a_snapshot_does_not_touch_the_model_and_is_checked(mlp: nn.Module) -> None:
    swag = lw.subsets.Swag(mlp)
    before = theta(mlp)
    swag.update()
    assert torch.equal(theta(mlp), before)
    with pytest.raises(InvalidValue, match="at least 2 snapshots, Swag has 1"):
        lw.subsets.largest_variance(swag, 3)
    mlp[0].requires_grad_(False)  # type: ignore[index]
    with pytest.raises(InvalidValue, match="other trainable parameters"):
        swag.update()
    mlp[0].requires_grad_(True)  # type: ignore[index]
    with torch.no_grad():
        mlp[2].bias.fill_(torch.nan)  # type: ignore[index, union-attr, operator]
    with pytest.raises(InvalidValue, match="diverged"):
        swag.update()


def test_random_is_uniform_and_its_generator_is_the_users(mlp: nn.Module) -> None:
    state = torch.get_rng_state()
    assert torch.equal(flat(mlp, lw.subsets.random(mlp, 5)), flat(mlp, lw.subsets.random(mlp, 5)))
    generator, twin = torch.Generator().manual_seed(3), torch.Generator().manual_seed(3)
    first, second = (flat(mlp, lw.subsets.random(mlp, 5, generator)) for _ in range(2))
    assert not torch.equal(first, second)
    assert torch.equal(first, flat(mlp, lw.subsets.random(mlp, 5, twin)))
    assert torch.equal(torch.get_rng_state(), state)
    draws = 800
    often = torch.stack([flat(mlp, lw.subsets.random(mlp, 13, generator)) for _ in range(draws)]).double().mean(0)
    assert (often - 1 / 3).abs().max() < 5 * math.sqrt(1 / 3 * 2 / 3 / draws)


def test_of_equal_weights_the_first_win() -> None:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, -0.5), nn.init.constant_(model.bias, 0.5)
    masks = lw.subsets.largest_magnitude(model, 4)
    assert masks["weight"].tolist() == [[True, True, True], [True, False, False]]
    assert "bias" not in masks
    swag = lw.subsets.Swag(model)
    swag.update(), swag.update()
    assert lw.subsets.largest_variance(swag, 4)["weight"].equal(masks["weight"])  # a run that stands still


def test_frozen_parameters_are_never_chosen(mlp: nn.Module, regression: Any) -> None:
    mlp[0].requires_grad_(False)  # type: ignore[index]
    with torch.no_grad():
        mlp[0].weight.mul_(1e3)  # type: ignore[index, union-attr, operator]
    swag = lw.subsets.Swag(mlp)
    swag.update(), swag.update()
    la = lw.laplace(mlp, regression, "gaussian", structure="diag")
    for masks in (
        lw.subsets.random(mlp, 15),
        lw.subsets.largest_magnitude(mlp, 1.0),
        lw.subsets.largest_variance(la, 15),
        lw.subsets.largest_variance(swag, 15),
    ):
        assert set(masks) == {"2.weight", "2.bias"}
    with pytest.raises(InvalidValue, match="from 1 to 15"):
        lw.subsets.random(mlp, 16)
    mlp.requires_grad_(False)
    with pytest.raises(InvalidValue, match="none to choose from"):
        lw.subsets.random(mlp, 1)


def test_a_selection_among_some_weights_stays_among_them(mlp: nn.Module, regression: Any) -> None:
    among = lw.subsets.random(mlp, 20)
    la = lw.laplace(mlp, regression, "gaussian", structure="diag", subset=among)
    chosen = flat(mlp, lw.subsets.largest_variance(la, 6))
    assert int(chosen.sum()) == 6
    assert not bool((chosen & ~flat(mlp, among)).any())
    variance = torch.zeros(39, dtype=torch.float64)
    variance[flat(mlp, among)] = 1 / linalg.diagonal(la.posterior.precision)
    assert variance[chosen].min() > variance[~chosen].max()


def test_dead_weights_are_counted_when_they_are_chosen(regression: Any) -> None:
    model = nn.Sequential(nn.Linear(5, 4), nn.ReLU(), nn.Linear(4, 3)).double()
    with torch.no_grad():
        model[0].bias[1] = -1e3  # type: ignore[index]
    la = lw.laplace(model, regression, "gaussian", structure="diag")
    dead = [("0.weight", 1), ("0.bias", 1)]
    with pytest.warns(LapwingWarning, match="9 of the 10 weights chosen by variance have no curvature"):
        masks = lw.subsets.largest_variance(la, 10)  # 5 inputs, a bias and 3 outputs of the dead unit
    assert all(bool(masks[n][i].all()) for n, i in dead)
    assert bool(masks["2.weight"][:, 1].all())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lw.subsets.largest_variance(lw.laplace(model, regression, "gaussian", structure="diag", subset=["2.bias"]), 2)


@pytest.mark.parametrize(
    ("k", "says"),
    [
        (0, "from 1 to 39"),
        (-3, "from 1 to 39"),
        (40, "from 1 to 39"),
        (0.0, r"\(0, 1\]"),
        (1.5, r"\(0, 1\]"),
        (float("nan"), r"\(0, 1\]"),
        (True, "number of weights"),
        ("half", "number of weights"),
        (None, "number of weights"),
    ],
)
def test_a_size_that_cannot_be_is_named(mlp: nn.Module, k: Any, says: str) -> None:
    for choose in (lw.subsets.random, lw.subsets.largest_magnitude):
        with pytest.raises(InvalidValue, match=says):
            choose(mlp, k)


def test_sources_that_have_no_variances_are_named(mlp: nn.Module, regression: Any) -> None:
    with pytest.raises(InvalidValue, match=r"structure='diag', got 'full"):
        lw.subsets.largest_variance(lw.laplace(mlp, regression, "gaussian", structure="full"), 3)
    with pytest.raises(InvalidValue, match="Laplace or a Swag object, got Sequential"):
        lw.subsets.largest_variance(mlp, 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="got str"):
        lw.subsets.random("mlp", 3)  # type: ignore[arg-type]
    with pytest.raises(InvalidValue, match="lazy"):
        lw.subsets.random(nn.LazyLinear(3), 3)
    with torch.no_grad():
        mlp[0].weight[0, 0] = torch.inf  # type: ignore[index]
    with pytest.raises(InvalidValue, match="infinite"):
        lw.subsets.largest_magnitude(mlp, 3)


# -- one vector as a mask --------------------------------------------------------------------------------------------


def test_one_vector_is_the_masks_it_is_cut_into(mlp: nn.Module) -> None:
    vector = torch.arange(39) % 5 == 1
    layout = lw.linearize(mlp, vector).layout
    assert torch.equal(
        flat(mlp, {n: layout.masks.get(n, torch.ones(s, dtype=torch.bool)) for n, s in layout.shapes.items()}), vector
    )
    mlp[0].requires_grad_(False)  # type: ignore[index]
    assert lw.linearize(mlp, torch.ones(15, dtype=torch.bool)).layout.names == ("2.weight", "2.bias")


@pytest.mark.parametrize(
    ("vector", "says"),
    [
        (torch.ones(38, dtype=torch.bool), r"\(39,\).*\(38,\)"),
        (torch.ones(39), "float32"),
        (torch.arange(5), "int64"),
        (torch.zeros(39, dtype=torch.bool), "no element"),
        (torch.ones(39, 1, dtype=torch.bool), r"\(39, 1\)"),
        (torch.ones(39, dtype=torch.bool).numpy(), "one bool vector; got ndarray"),
    ],
)
def test_vectors_that_do_not_fit_are_named(mlp: nn.Module, vector: Any, says: str) -> None:
    with pytest.raises(InvalidValue, match=says):
        lw.linearize(mlp, vector)


# -- posteriors over a mask ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", ["gaussian", "categorical"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_posterior_over_a_mask_is_the_dense_submatrix(
    problem: Any, jacobian: Oracle, structure: str, likelihood: str, seed: int
) -> None:
    """H_SS + A_SS: whole for full, its blocks for kron and block (every parameter here is cut), its diagonal for diag;
    and with it the evidence, the predictive covariance and draws outside the mask."""
    model, x, y = problem[likelihood]
    masks = lw.subsets.random(model, 17, torch.Generator().manual_seed(seed))
    chosen = flat(model, masks)
    la = lw.laplace(
        model, (x, y), likelihood_of(likelihood), structure=STRUCTURES[structure], subset=masks, prior=PRIOR
    )

    H = curvature(jacobian, model, x, likelihood)
    if structure == "diag":
        H = H.diagonal().diag()
    elif structure in ("kron", "block"):
        H = H * blocks(model, chosen)
    P = H[chosen][:, chosen] + PRIOR * torch.eye(17, dtype=torch.float64)
    got = la.posterior.precision
    if structure == "full (dual)":
        assert_close(linalg.solve(got, torch.eye(17, dtype=torch.float64)), P.inverse(), rtol=1e-8, atol=1e-10)
    else:
        assert_close(linalg.to_dense(got), P, rtol=1e-8, atol=1e-10)

    evidence = log_lik(model, x, y, likelihood) - 0.5 * PRIOR * theta(model)[chosen].square().sum()
    evidence -= 0.5 * (P.logdet() - 17 * math.log(PRIOR))
    assert_close(la.log_evidence(), evidence, rtol=1e-8, atol=1e-8)

    new = torch.randn(6, 5, dtype=torch.float64)
    J = jacobian(model, lambda m: m(new))[..., chosen]
    assert_close(la.predict(new).covariance, J @ P.inverse() @ J.mT, rtol=1e-8, atol=1e-10)
    drawn = torch.cat(
        [la.draw(3).get(n, p.detach().expand(3, *p.shape)).flatten(1) for n, p in model.named_parameters()], 1
    )
    assert torch.equal(drawn[:, ~chosen], theta(model)[~chosen].expand(3, -1))
    assert not bool((drawn[:, chosen] == theta(model)[chosen]).any())


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_full_mask_is_the_full_posterior(mlp: nn.Module, classification: Any, structure: str) -> None:
    how = {"structure": STRUCTURES[structure], "prior": "layerwise"}
    new = torch.randn(4, 5, dtype=torch.float64)
    whole = lw.laplace(mlp, classification, "categorical", **how)
    for subset in (lw.subsets.largest_magnitude(mlp, 1.0), torch.ones(39, dtype=torch.bool)):
        la = lw.laplace(mlp, classification, "categorical", subset=subset, **how)
        assert la.coverage == whole.coverage
        assert torch.equal(la.log_evidence(), whole.log_evidence())
        assert torch.equal(la.predict(new).covariance, whole.predict(new).covariance)


def test_a_convolution_and_a_norm_may_be_cut(cnn: nn.Module, images: Tensor, jacobian: Oracle) -> None:
    y = torch.randn(4, 2, dtype=torch.float64)
    masks = lw.subsets.random(cnn, 40)
    chosen = flat(cnn, masks)
    H = curvature(jacobian, cnn.eval(), images, "gaussian")
    for name, structure in STRUCTURES.items():
        if name == "full (dual)":
            continue
        la = lw.laplace(cnn, (images, y), likelihood_of("gaussian"), structure=structure, subset=masks, prior=PRIOR)
        want = H.diagonal().diag() if name == "diag" else H if name in EXACT else H * blocks(cnn, chosen)
        assert_close(
            linalg.to_dense(la.posterior.precision),
            want[chosen][:, chosen] + PRIOR * torch.eye(40, dtype=torch.float64),
            rtol=1e-8,
            atol=1e-9,
        )


def test_coverage_says_how_a_cut_layer_is_treated(mlp: nn.Module, regression: Any) -> None:
    masks = {"0.weight": torch.ones(4, 5, dtype=torch.bool).tril(), "2.weight": torch.ones(3, 4, dtype=torch.bool)}
    la = lw.laplace(mlp, regression, "gaussian", structure="kron", subset=masks)
    assert la.coverage == {
        "0.weight": "exact block, generic: only some of its elements are selected",
        "2.weight": "Kronecker (Linear rule)",
        "0.bias": "frozen",
        "2.bias": "frozen",
    }
    wide = nn.Sequential(nn.Linear(40, 60), nn.Tanh(), nn.Linear(60, 2)).double()
    data = torch.randn(6, 40, dtype=torch.float64), torch.randn(6, 2, dtype=torch.float64)
    la = lw.laplace(wide, data, "gaussian", structure="kron", subset={"0.weight": torch.rand(60, 40) < 0.6})
    assert la.coverage["0.weight"] == "exact diagonal, generic: only some of its elements are selected"


# -- priors, tuning, files -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per", ["all", "layer", "unit", "weight"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_priors_of_every_kind_over_a_mask(problem: Any, jacobian: Oracle, structure: str, per: str) -> None:
    """Different precisions for each group, laid out by hand: A_SS must be the right elements of A."""
    model, x, y = problem["gaussian"]
    masks = lw.subsets.random(model, 21, torch.Generator().manual_seed(5))
    chosen = flat(model, masks)
    unit = torch.cat(
        [
            torch.arange(4).repeat_interleave(5),
            torch.arange(4),
            4 + torch.arange(3).repeat_interleave(4),
            4 + torch.arange(3),
        ]
    )
    group = {
        "all": torch.zeros(39, dtype=torch.long),
        "layer": (torch.arange(39) >= 24).long(),
        "unit": unit,
        "weight": torch.arange(39),
    }[per][chosen]
    _, group = group.unique(return_inverse=True)
    values = 0.5 + torch.arange(int(group.max()) + 1, dtype=torch.float64) / 3
    prior = lw.priors.Gaussian(values if per != "all" else values[0], per=per)
    la = lw.laplace(
        model, (x, y), likelihood_of("gaussian"), structure=STRUCTURES[structure], subset=masks, prior=prior
    )
    H = curvature(jacobian, model, x, "gaussian")
    H = H.diagonal().diag() if structure == "diag" else H if structure in EXACT else H * blocks(model, chosen)
    P = H[chosen][:, chosen] + values[group].diag()
    evidence = log_lik(model, x, y, "gaussian") - 0.5 * (values[group] * theta(model)[chosen].square()).sum()
    evidence -= 0.5 * (P.logdet() - values[group].log().sum())
    assert_close(la.log_evidence(), evidence, rtol=1e-8, atol=1e-8)
    new = torch.randn(4, 5, dtype=torch.float64)
    J = jacobian(model, lambda m: m(new))[..., chosen]
    assert_close(la.predict(new).covariance, J @ P.inverse() @ J.mT, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("structure", ["full", "kron", "diag"])
def test_tuning_over_a_mask_ends_where_the_evidence_is_flat(mlp: nn.Module, regression: Any, structure: str) -> None:
    masks = lw.subsets.largest_magnitude(mlp, 0.5)
    la = lw.laplace(mlp, regression, "gaussian", structure=structure, subset=masks, prior="layerwise")
    tuned = la.tuned(center="map")
    assert tuned.tuning is not None
    assert not tuned.tuning.at_bound
    assert tuned.log_evidence() > la.log_evidence()
    precision = tuned.prior.precision.detach().clone().requires_grad_()
    noise = tuned.likelihood.noise.detach().clone().requires_grad_()
    value = tuned.log_evidence(
        prior=tuned.prior.replace(precision=precision), likelihood=lw.likelihoods.Gaussian(noise)
    )
    for slope, at in zip(torch.autograd.grad(value, (precision, noise)), (precision, noise), strict=True):
        assert_close(slope * at, torch.zeros_like(at), rtol=0.0, atol=1e-3)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_file_keeps_the_mask(mlp: nn.Module, regression: Any, structure: str, tmp_path: Path) -> None:
    masks = lw.subsets.random(mlp, 11)
    la = lw.laplace(mlp, regression, "gaussian", structure=STRUCTURES[structure], subset=masks, prior="layerwise")
    la.save(tmp_path / "net")
    again = lw.load(tmp_path / "net", copy.deepcopy(mlp))
    new = torch.randn(4, 5, dtype=torch.float64)
    assert again.state.layout.same_as(la.state.layout)
    assert torch.equal(again.log_evidence(), la.log_evidence())
    assert torch.equal(again.predict(new).covariance, la.predict(new).covariance)


def test_states_over_different_masks_do_not_add(mlp: nn.Module, regression: Any) -> None:
    a, b = (
        lw.laplace(mlp, regression, "gaussian", structure="diag", subset=lw.subsets.random(mlp, k)) for k in (9, 10)
    )
    with pytest.raises(InvalidValue, match="do not add"):
        a.state + b.state


def test_the_doctor_takes_a_mask(mlp: nn.Module, regression: Any) -> None:
    for subset in (lw.subsets.random(mlp, 9), torch.arange(39) % 2 == 0):
        report = lw.doctor(mlp, regression, "gaussian", subset=subset)
        assert not [f for f in report.findings if f.severity == "error"], str(report)
        assert "subset=subset" in report.recommendation
