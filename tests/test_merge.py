"""Data that come, that come together, and that go: fits add over data, and what was added can be taken out."""

from __future__ import annotations

import contextlib
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import helpers
import lapwing as lw
from helpers import draw
from helpers import normed as network

STRUCTURES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": lw.curvature.Kronecker(),
    "diag": lw.curvature.Diagonal(),
    "block": lw.curvature.Block(),
    "lowrank": lw.curvature.LowRank(9),
}
BASED: dict[str, tuple[Any, Any]] = {  # states that add in a shared basis only, and what gives one
    "ekfac": (lw.curvature.EigenKronecker(), lw.curvature.Kronecker()),
    "lowrank, 2 passes": (lw.curvature.LowRank(9, 2), lw.curvature.LowRank(9)),
}
N, CUTS = 29, (slice(0, 8), slice(8, 19), slice(19, 29))


def problem(kind: str = "gaussian") -> tuple[nn.Module, Tensor, Tensor, Any]:
    x = draw(N, 3)
    if kind == "categorical":
        return network(), x, torch.randint(2, (N,)), lw.likelihoods.Categorical()
    noise = torch.tensor([0.3, 0.8]) if kind == "per output" else torch.tensor(0.4)
    return network(), x, draw(N, 2), lw.likelihoods.Gaussian(noise.double())


def close(actual: Tensor, expected: Tensor, tolerance: float = 1e-10) -> None:
    helpers.close(actual, expected, tolerance)


def assert_same(a: lw.Laplace, b: lw.Laplace, tolerance: float = 1e-10, new: Tensor | None = None) -> None:
    assert a.state.n == b.state.n
    assert a.state.targets == b.state.targets
    for part in ("statistics", "sums"):
        mine, theirs = getattr(a.state, part), getattr(b.state, part)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            size = float(theirs[key].abs().max())
            torch.testing.assert_close(value, theirs[key], rtol=tolerance, atol=tolerance * size)
    new = torch.linspace(-1, 1, 9, dtype=torch.float64).reshape(3, 3) if new is None else new
    close(a.log_evidence(), b.log_evidence(), tolerance)
    close(a.predict(new).covariance, b.predict(new).covariance, tolerance)
    close(a.effective_dimension(), b.effective_dimension(), tolerance)


# -- merging ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_merged_objects_and_files_are_one_fit_of_all_the_data(structure: str, kind: str, tmp_path: Path) -> None:
    model, x, y, likelihood = problem(kind)
    options = {"structure": STRUCTURES[structure], "prior": {"0.*": 2.0, "[13].*": 0.5}}
    whole = lw.laplace(model, (x, y), likelihood, **options)
    parts = [lw.laplace(model, (x[i], y[i]), likelihood, **options) for i in CUTS]
    paths = [tmp_path / f"{i}.safetensors" for i in range(3)]
    for part, path in zip(parts, paths, strict=True):
        part.save(path)
    assert_same(lw.merge(parts), whole)
    assert_same(lw.merge(paths, model), whole)
    assert_same(lw.merge([str(paths[2]), parts[0], paths[1]], model), whole)
    assert_same(lw.merge([parts[1]]), parts[1])
    merged = lw.merge(parts)
    assert (merged.center, merged.tuning, merged.coverage) == ("map", None, whole.coverage)
    merged.save(tmp_path / "merged")
    assert torch.equal(lw.load(tmp_path / "merged", model).log_evidence(), merged.log_evidence())
    assert lw.merge(paths, model).data is None
    close(merged.recentered().log_evidence(), whole.recentered().log_evidence(), 1e-8)  # it knows the data of its parts


@pytest.mark.parametrize("structure", BASED)
def test_states_in_one_basis_merge_and_others_do_not(structure: str) -> None:
    model, x, y, likelihood = problem("categorical")
    own, first = BASED[structure]
    tangent = lw.linearize(model)
    shared = lw.accumulate(first, tangent, likelihood, (x, y))
    states = [lw.accumulate(own, tangent, likelihood, (x[i], y[i]), basis=shared) for i in CUTS]
    fits = [lw.from_state(state, model, 1.0, likelihood) for state in states]
    assert_same(lw.merge(fits), lw.laplace(model, (x, y), likelihood, structure=own))
    with pytest.raises(lw.errors.InvalidValue, match=r"cannot merge fit 0 and fit 1.*basis"):
        lw.merge([lw.laplace(model, (x[i], y[i]), likelihood, structure=own) for i in CUTS])


def test_matrix_free_fits_merge_where_their_data_are(tmp_path: Path) -> None:
    model, x, y, likelihood = problem()
    structure = lw.curvature.MatrixFree(samples=8, preconditioner="diag", tolerance=1e-10)
    whole = lw.laplace(model, (x, y), likelihood, structure=structure)
    parts = [lw.laplace(model, (x[i], y[i]), likelihood, structure=structure) for i in CUTS]
    merged, v = lw.merge(parts), draw(2, 34)
    weights = likelihood.curvature_weights("exact")
    close(merged.state.source.product(v, weights)[0], whole.state.source.product(v, weights)[0])
    close(merged.log_evidence(), whole.log_evidence(), 0.2)  # an estimate, with other probes
    parts[0].save(tmp_path / "file")
    with pytest.raises(lw.errors.InvalidValue, match=r"file is matrix_free.*data=\.\.\."):
        lw.merge([tmp_path / "file", parts[1]], model)
    loaded = lw.load(tmp_path / "file", model, data=(x[CUTS[0]], y[CUTS[0]]))
    again = lw.merge([loaded, *parts[1:]])
    close(again.state.source.product(v, weights)[0], whole.state.source.product(v, weights)[0])


def test_a_g_prior_is_placed_at_the_merged_curvature() -> None:
    model, x, y, likelihood = problem()
    options = {"structure": "diag", "prior": "gprior"}
    parts = [lw.laplace(model, (x[i], y[i]), likelihood, **options) for i in CUTS]
    assert_same(lw.merge(parts), lw.laplace(model, (x, y), likelihood, **options))


def test_fits_that_do_not_belong_together_do_not_merge(tmp_path: Path) -> None:
    model, x, y, likelihood = problem()
    usual = {"structure": "kron", "prior": 1.0}

    def fit(cut: slice, net: nn.Module = model, noise: Any = likelihood, **options: Any) -> lw.Laplace:
        return lw.laplace(net, (x[cut], y[cut]), noise, **{**usual, **options})

    moved = network()
    moved.load_state_dict(model.state_dict())
    with torch.no_grad():
        moved[3].bias[1] += 1e-9
    first, rest = fit(CUTS[0]), CUTS[1]
    for other, says in [
        (fit(rest, structure="diag"), "structures"),
        (fit(rest, factor="empirical"), "output factors"),
        (fit(rest, subset="last_layer"), "parameters|treatments"),
        (fit(rest, moved), r"weights.*3\.bias"),
        (fit(rest, prior=2.0), "priors differ.*precision [12] and .*precision [12]"),
        (fit(rest, prior="layerwise"), "priors differ.*per layer"),
        (fit(rest, prior=lw.priors.Gaussian(1.0, mean=0.1)), "priors differ"),
        (fit(rest, prior="gprior"), "priors differ.*GPrior"),
        (fit(rest).tuned(fixed="noise"), "priors differ.*tune after merging"),
        (fit(rest, noise=lw.likelihoods.Gaussian(0.5)), r"noises differ.*0\.[45].*0\.[45]"),
        (replace(fit(rest), temperature=0.5), "temperatures differ"),
        (first, "same data, which would count twice"),
        (fit(CUTS[0]), "same data"),
    ]:
        for pair in ([first, other], [other, first]):
            with pytest.raises(lw.errors.InvalidValue, match=says):
                lw.merge(pair)
    with pytest.raises(lw.errors.InvalidValue, match="fit 1 and fit 3 are of the same data"):
        lw.merge([first, fit(CUTS[1]), fit(CUTS[2]), fit(CUTS[1])])
    first.save(tmp_path / "file")
    for bad, says in [([], "at least one"), (tmp_path / "file", "a list"), ([tmp_path / "file"], "pass model=")]:
        with pytest.raises(lw.errors.InvalidValue, match=says):
            lw.merge(bad)
    with pytest.raises(lw.errors.InvalidValue, match="model= is for files"):
        lw.merge([first], model)
    with pytest.raises(lw.errors.InvalidValue, match=r"3\.bias"):
        lw.merge([tmp_path / "file"], moved)


# -- updating --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", [*STRUCTURES, *BASED])
def test_updating_is_merging_with_a_fit_of_the_new_data(structure: str) -> None:
    model, x, y, likelihood = problem("categorical")
    own = STRUCTURES.get(structure) or BASED[structure][0]
    parts = [(x[i], y[i]) for i in CUTS]
    grown = lw.laplace(model, parts[0], likelihood, structure=own).updated(parts[1]).updated(parts[2])
    if structure in STRUCTURES:
        assert_same(grown, lw.laplace(model, (x, y), likelihood, structure=own))
    else:  # the basis stays that of the first data
        tangent, first = lw.linearize(model), BASED[structure][1]
        shared = lw.accumulate(first, tangent, likelihood, parts[0])
        state = lw.accumulate(own, tangent, likelihood, (x, y), basis=shared)
        assert_same(grown, lw.from_state(state, model, 1.0, likelihood))


# -- taking out ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["gaussian", "per output", "categorical"])
@pytest.mark.parametrize("structure", STRUCTURES)
def test_what_is_left_is_a_fit_of_the_data_that_stay(structure: str, kind: str, factor: str, tmp_path: Path) -> None:
    if (factor, kind) == ("empirical", "per output"):
        return  # refused by the fit itself
    model, x, y, likelihood = problem(kind)
    options = {"structure": STRUCTURES[structure], "factor": factor, "prior": "layerwise"}
    whole = lw.laplace(model, (x, y), likelihood, **options)
    before = whole.log_evidence()
    stay = torch.tensor([i % 3 != 1 for i in range(N)])  # from every batch, in another order
    gone = [(x[~stay][[3, 0, 1]], y[~stay][[3, 0, 1]]), (x[~stay][[2]], y[~stay][[2]]), (x[~stay][4:], y[~stay][4:])]
    left = whole.without(gone)
    assert_same(left, lw.laplace(model, (x[stay], y[stay]), likelihood, **options), 1e-8)
    assert 0 < left.state.lost < 1.5
    assert re.search(r"0\.\d digits lost by removals, about 15\.\d left", repr(left))
    assert torch.equal(whole.log_evidence(), before)
    assert (left.data, left.tuning) == (None, None)
    left.save(tmp_path / "file")
    assert lw.load(tmp_path / "file", model).state.lost == left.state.lost
    assert_same(left.updated(gone), whole, 1e-8)


def test_in_a_basis_the_basis_stays() -> None:
    model, x, y, likelihood = problem("categorical")
    for own, _ in BASED.values():
        whole = lw.laplace(model, (x, y), likelihood, structure=own)
        left = whole.without((x[:9], y[:9]))
        state = lw.accumulate(own, lw.linearize(model), likelihood, (x[9:], y[9:]), basis=whole.state)
        assert_same(left, lw.from_state(state, model, 1.0, likelihood), 1e-8)


def test_the_hessian_can_be_taken_out_too() -> None:
    model, x, y, likelihood = problem()
    options = {"factor": "hessian", "prior": 900.0}
    left = lw.laplace(model, (x, y), likelihood, **options).without((x[:9], y[:9]))
    assert_same(left, lw.laplace(model, (x[9:], y[9:]), likelihood, **options), 1e-8)


@pytest.mark.parametrize("structure", ["primal", "kron", "diag"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_digits_lost_are_those_that_cancel(structure: str, dtype: torch.dtype) -> None:
    """A few small examples beside large ones, which go: the error of what is left is of the size of ε times 10^lost."""
    model, eps = nn.Linear(3, 2).to(dtype), torch.finfo(dtype).eps
    x, y = draw(900, 3).to(dtype), draw(900, 2).to(dtype)
    x[5:] *= 3e2
    whole = lw.laplace(model, (x, y), "gaussian", structure=STRUCTURES[structure])
    alone = lw.laplace(model, (x[:5], y[:5]), "gaussian", structure=STRUCTURES[structure]).state
    few = pytest.warns(lw.errors.LapwingWarning, match="7.. decimal digits cancelled, and about 0.0 are left|6.9")
    with few if dtype == torch.float32 else contextlib.nullcontext():
        left = whole.without((x[5:], y[5:])).state
    apart = max(float((left.sums[key] - value).norm() / value.norm()) for key, value in alone.sums.items())
    assert left.lost > 5
    assert math.isclose(left.digits, -math.log10(eps) - left.lost)
    assert 0 < apart <= 100 * eps * 10**left.lost
    again = lw.from_state(left, model, 1.0, "gaussian").updated((x[5:], y[5:])).state
    assert again.lost == left.lost  # what is lost does not come back


def test_what_rounding_makes_indefinite_is_made_positive_again() -> None:
    """Inputs over several powers of ten in float32, the largest of which go; and a matrix of low rank."""
    spread = 10 ** torch.linspace(3, -1, 90).unsqueeze(1)
    model, x = nn.Linear(30, 3), torch.randn(90, 30) * spread
    y = torch.randint(3, (90,))
    whole = lw.laplace(model, (x, y), "categorical", structure="kron")
    with pytest.warns(lw.errors.LapwingWarning, match="are left in the worst sum"):
        left = whole.without((x[:70], y[:70]))
    again = lw.laplace(model, (x[70:], y[70:]), "categorical", structure="kron")
    close(left.log_evidence(), again.log_evidence(), 0.1)  # about one digit is left
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Tanh(), nn.Flatten(), nn.Linear(96, 3))
    images, labels = torch.randn(23, 1, 6, 6), torch.randint(3, (23,))
    primal = STRUCTURES["primal"]
    left = lw.laplace(net, (images, labels), "categorical", structure=primal).without((images[:7], labels[:7]))
    again = lw.laplace(net, (images[7:], labels[7:]), "categorical", structure=primal)
    close(left.log_evidence(), again.log_evidence(), 1e-4)


@pytest.mark.parametrize("structure", ["primal", "kron", "diag", "block", "lowrank", "ekfac"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical"])
def test_data_that_were_not_in_the_fit_are_told_by_what_would_be_left(structure: str, kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    la = lw.laplace(model, (x, y), likelihood, structure=STRUCTURES.get(structure, structure))
    other = -x[:9] if kind == "categorical" else 5 * x[:9]
    wrong = 1 - y[:9] if kind == "categorical" else y[:9] + 30
    for data, says in [
        ((x, y), "cannot take 29 examples out of a fit of 29"),
        ((torch.cat([x, x]), torch.cat([y, y])), "cannot take 58 examples"),
        ([(other, y[:9])] * 3, "were not all in the fit"),
        ([(x[:9], wrong)] * 3, "were not all in the fit"),
    ]:
        with pytest.raises(lw.errors.InvalidValue, match=says):
            la.without(data)
    assert la.state.lost == 0


@pytest.mark.parametrize("structure", ["primal", "kron", "diag", "block", "lowrank", "ekfac"])
def test_the_curvature_alone_tells_too(structure: str) -> None:
    model, x, y, likelihood = problem()
    la = lw.laplace(model, (x, y), likelihood, structure=STRUCTURES.get(structure, structure))
    basis = la.state if la.state.basis else None
    part = lw.accumulate(la.state.structure, la.tangent, likelihood, (x[:9], y[:9]), basis=basis)
    for key in part.sums:
        if key == "trace" or key.endswith("count"):
            continue
        large = replace(part, sums={k: 9 * v if k == key else v for k, v in part.sums.items()})
        with pytest.raises(lw.errors.InvalidValue, match=f"least (entry|eigenvalue) of {key} would be -"):
            lw.curvature.without(la.state, large)
    assert lw.curvature.without(la.state, part).n == 20


def test_what_cannot_be_taken_out_says_so() -> None:
    model, x, y, likelihood = problem("categorical")
    la = lw.laplace(model, (x, y), likelihood, structure="kron", factor="monte_carlo")
    with pytest.raises(lw.errors.InvalidValue, match="draws of a monte_carlo factor"):
        la.without((x[:3], y[:3]))
    with pytest.raises(lw.errors.Unsupported, match="matrix_free keeps no sums"):
        lw.laplace(model, (x, y), likelihood, structure="matrix_free").without((x[:3], y[:3]))
    with pytest.raises(lw.errors.InvalidValue, match="NaN"):
        lw.laplace(model, (x, y), likelihood).without((x[:3] * torch.nan, y[:3]))


def test_a_g_prior_refuses_weights_whose_curvature_went_with_the_data() -> None:
    model = nn.Embedding(5, 2).double()
    x, y = torch.randint(4, (N,)), draw(N, 2)
    x[-3:] = 4
    la = lw.laplace(model, (x, y), "gaussian", structure="diag", prior="gprior")
    assert_same(
        la.without((x[:3], y[:3])),
        lw.laplace(model, (x[3:], y[3:]), "gaussian", structure="diag", prior="gprior"),
        1e-8,
        x[:2],
    )
    with pytest.raises(lw.errors.InvalidValue, match="2 weights had curvature from these data alone"):
        la.without((x[-3:], y[-3:]))


# -- the dual form drops rows ----------------------------------------------------------------------------------------


def dual(model: nn.Module, data: Any, likelihood: Any = "gaussian", **options: Any) -> lw.Laplace:
    return lw.laplace(model, data, likelihood, structure=lw.curvature.Full("dual"), **options)


def rows(la: lw.Laplace) -> list[tuple[list[float], list[float]]]:
    return sorted((x[i].tolist(), u[i].reshape(-1).tolist()) for x, u in la.state.batches for i in range(len(u)))


@pytest.mark.parametrize("factor", ["exact", "empirical", "monte_carlo"])
def test_the_rows_that_stay_are_those_that_were_there_bit_by_bit(factor: str) -> None:
    model, x, y, likelihood = problem("categorical")
    whole = dual(model, [(x[:10], y[:10]), (x[10:], y[10:])], likelihood, factor=factor)
    order = [28, 3, 9, 10]
    left = whole.without([(x[order], y[order])])
    assert rows(left) == [row for row in rows(whole) if row[0] not in x[order].tolist()]
    assert left.state.holds_data
    none = whole.without((x[:10], y[:10]))
    assert len(none.state.batches) == 1
    with pytest.raises(lw.errors.InvalidValue, match="is not in the fit"):
        none.without((x[4:5], y[4:5]))
    with pytest.raises(lw.errors.InvalidValue, match="is not in the fit"):
        whole.without((torch.cat([x[:2], x[:1]]), torch.cat([y[:2], y[:1]])))  # one of them twice


def test_of_equal_inputs_that_of_the_same_target_goes() -> None:
    model, x, y, likelihood = problem()
    x[7] = x[3]
    whole = dual(model, (x, y), likelihood, factor="empirical")
    for gone in (3, 7):
        stay = [i for i in range(N) if i != gone]
        left = whole.without((x[[gone]], y[[gone]]))
        assert_same(left, dual(model, (x[stay], y[stay]), likelihood, factor="empirical"), 1e-8)


def test_inputs_in_trees_and_batches_that_cannot_be_cut_go_too() -> None:
    model, x, y, likelihood = problem()
    options = {"forward": lambda model, batch: model(batch["a"] + batch["b"][0])}
    tree = [({"a": x[i], "b": (x[i].flip(0),)}, y[i]) for i in CUTS]
    left = dual(model, tree, likelihood, **options).without([({"a": x[2:5], "b": (x[CUTS[0]].flip(0)[2:5],)}, y[2:5])])
    assert left.state.n == N - 3
    options = {"forward": lambda model, x: model(x - x.mean(0))}  # mixes its batch
    batches = [(x[i], y[i]) for i in CUTS]
    whole = dual(model, batches, likelihood, **options)
    assert_same(whole.without(batches[1:2]), dual(model, [batches[0], batches[2]], likelihood, **options), 1e-8)
    with pytest.raises(lw.errors.InvalidValue, match="whole batches where they cannot be cut"):
        whole.without([(x[:3], y[:3])])
