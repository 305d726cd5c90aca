"""States are sums over data: state(A ∪ B) = state(A) + state(B), whatever the batches, their order, or the noise."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

import lapwing as lw
from helpers import close, draw

STRUCTURES = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "diag": lw.curvature.Diagonal(),
    "block": lw.curvature.Block(),
    "kron": lw.curvature.Kronecker(),
}
LIKELIHOODS = ("gaussian", "per output", "categorical", "bernoulli")


def mlp() -> nn.Module:
    """3 -> 4 -> 2, p = 26."""
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def problem(kind: str, n: int = 11) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    model, x = mlp(), draw(n, 3)
    if kind == "categorical":
        return model, x, torch.randint(2, (n,)), lw.likelihoods.Categorical()
    if kind == "bernoulli":
        return model, x, torch.randint(2, (n, 2)), lw.likelihoods.Bernoulli()
    noise = torch.tensor([0.3, 0.8]) if kind == "per output" else torch.tensor(0.4)
    return model, x, draw(n, 2), lw.likelihoods.Gaussian(noise.double())


def assert_same(a: lw.Laplace, b: lw.Laplace, new: Tensor, tolerance: float = 1e-8) -> None:
    assert a.state.n == b.state.n
    assert a.state.sums.keys() == b.state.sums.keys()
    for key, value in a.state.statistics.items():
        close(value, b.state.statistics[key], tolerance)
    close(a.log_evidence(), b.log_evidence(), tolerance)
    close(a.predict(new).covariance, b.predict(new).covariance, tolerance)
    close(a.effective_dimension(), b.effective_dimension(), tolerance)
    close(
        lw.operators.linalg.diagonal(a.posterior.precision),
        lw.operators.linalg.diagonal(b.posterior.precision),
        tolerance,
    )


# -- addition ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_the_state_of_a_union_is_the_sum_of_the_states(structure: str, factor: str, kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    options = {"structure": STRUCTURES[structure], "factor": factor, "prior": "layerwise"}
    if (factor, kind) == ("empirical", "per output"):
        with pytest.raises(lw.errors.LapwingError, match="factor='exact'"):
            lw.laplace(model, (x, y), likelihood, **options)
        return
    whole, *parts = (
        lw.laplace(model, (x[i], y[i]), likelihood, **options)
        for i in (slice(None), slice(3), slice(3, 4), slice(4, None))
    )
    a, b, c = (la.state for la in parts)
    new = draw(3, 3)
    for merged in (a + b + c, a + (b + c), c + a + b):
        assert merged.n == 11
        assert_same(lw.from_state(merged, model, whole.prior, likelihood), whole, new)
    assert a.n == 3  # nothing was added in place
    assert_same(lw.from_state(a, model, whole.prior, likelihood), parts[0], new, 1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_merged_states_tune_and_save_like_one(structure: str, tmp_path) -> None:
    model, x, y, likelihood = problem("categorical")
    whole, a, b = (
        lw.laplace(model, (x[i], y[i]), likelihood, structure=STRUCTURES[structure])
        for i in (slice(None), slice(4), slice(4, None))
    )
    merged = lw.from_state(a.state + b.state, model, 1.0, likelihood)
    close(merged.tuned(center="map").prior.precision, whole.tuned(center="map").prior.precision, 1e-6)
    merged.save(tmp_path / "file")
    close(lw.load(tmp_path / "file", model).log_evidence(), merged.log_evidence(), 1e-12)


@pytest.mark.parametrize("structure", ["primal", "diag", "block", "kron"])
@pytest.mark.parametrize("factor", ["exact", "empirical"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
def test_batch_size_and_order_do_not_matter(structure: str, factor: str, kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    order, new = torch.randperm(11), draw(3, 3)
    options = {"structure": STRUCTURES[structure], "factor": factor}
    whole = lw.laplace(model, (x, y), likelihood, **options)
    for data in (
        DataLoader(TensorDataset(x, y), batch_size=1),
        DataLoader(TensorDataset(x, y), batch_size=4),
        DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        TensorDataset(x[order], y[order]),
        [(x[order[:2]], y[order[:2]]), (x[order[2:]], y[order[2:]])],
        (x.numpy(), y.numpy()),
    ):
        assert_same(lw.laplace(model, data, likelihood, **options), whole, new)


def test_batch_size_and_order_do_not_matter_for_the_dual() -> None:
    for kind in LIKELIHOODS:
        model, x, y, likelihood = problem(kind)
        options, new = {"structure": STRUCTURES["dual"]}, draw(3, 3)
        whole = lw.laplace(model, (x, y), likelihood, **options)
        for data in (
            DataLoader(TensorDataset(x, y), batch_size=1),
            DataLoader(TensorDataset(x, y), batch_size=4, shuffle=True),
        ):
            la = lw.laplace(model, data, likelihood, **options)
            assert_same(la, whole, new)
            close(la.predict(new, joint=True).covariance, whole.predict(new, joint=True).covariance)


def test_positions_are_summed_over_batches_too() -> None:
    model, x, y = nn.Linear(2, 3).double(), draw(7, 4, 2), draw(7, 4, 3)
    for structure in ("primal", "dual", "diag"):
        whole, a, b = (
            lw.laplace(model, (x[i], y[i]), "gaussian", structure=STRUCTURES[structure])
            for i in (slice(None), slice(3), slice(3, None))
        )
        assert_same(lw.from_state(a.state + b.state, model, 1.0, "gaussian"), whole, x[:2])


def test_the_state_does_not_depend_on_the_noise_nor_on_the_prior() -> None:
    model, x, y, _ = problem("gaussian")
    for structure, factor in itertools.product(STRUCTURES, ("exact", "empirical", "monte_carlo")):
        a, b = (
            lw.laplace(
                model,
                (x, y),
                lw.likelihoods.Gaussian(noise),
                structure=STRUCTURES[structure],
                factor=factor,
                prior=prior,
            ).state
            for noise, prior in ((0.3, 1.0), (2.0, 5.0))
        )
        for key, value in a.sums.items():
            assert torch.equal(value, b.sums[key])
        for (_, mine), (_, theirs) in zip(a.batches, b.batches, strict=True):
            assert torch.equal(mine, theirs)


# -- what does not add -------------------------------------------------------------------------------------------


def test_states_that_do_not_belong_together_do_not_add() -> None:
    model, x, y, likelihood = problem("gaussian")
    data = x, y
    first = lw.laplace(model, data, likelihood, structure=STRUCTURES["primal"]).state
    moved = mlp()
    moved.load_state_dict(model.state_dict())
    with torch.no_grad():
        moved[2].bias[1] += 1e-9
    wider = nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    noises = lw.likelihoods.Gaussian(torch.tensor([0.3, 0.8]))
    primal = STRUCTURES["primal"]
    for other, says in [
        (lw.laplace(model, data, likelihood, structure="diag"), "structures"),
        (lw.laplace(model, data, likelihood, structure=STRUCTURES["dual"]), "structures"),
        (lw.laplace(model, data, likelihood, structure=primal, factor="empirical"), "factors"),
        (lw.laplace(model, (x, torch.randint(2, (11,))), "categorical", structure=primal), "likelihoods"),
        (lw.laplace(model, data, noises, structure=primal), "likelihoods"),
        (lw.laplace(model, data, likelihood, structure=primal, subset=["2.*"]), "parameters"),
        (lw.laplace(model, data, likelihood, structure=primal, subset=mask_of(model)), "parameters"),
        (lw.laplace(wider, data, likelihood, structure=primal), "parameters"),
        (lw.laplace(moved, data, likelihood, structure=primal), r"weights.*2\.bias"),
    ]:
        for a, b in ((first, other.state), (other.state, first)):
            with pytest.raises(lw.errors.InvalidValue, match=says):
                a + b
    few, many = (
        lw.laplace(model, data, likelihood, structure=primal, factor=lw.curvature.Factor("monte_carlo", samples)).state
        for samples in (2, 3)
    )
    with pytest.raises(lw.errors.InvalidValue, match="factors"):
        few + many


def mask_of(model: nn.Module) -> dict[str, Tensor]:
    mask = {n: torch.ones_like(p, dtype=torch.bool) for n, p in model.named_parameters()}
    mask["0.weight"][1, 2] = False
    return mask


def test_states_at_other_buffers_do_not_add() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
    data = draw(5, 3), draw(5, 2)
    before = lw.laplace(model, data, "gaussian").state
    model[1].running_mean += 0.1
    with pytest.raises(lw.errors.InvalidValue, match="running_mean"):
        before + lw.laplace(model, data, "gaussian").state


# -- updating ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("factor", ["exact", "empirical"])
def test_updating_is_fitting_on_all_the_data(structure: str, factor: str) -> None:
    model, x, y, likelihood = problem("categorical")
    options = {"structure": STRUCTURES[structure], "factor": factor, "prior": {"0.*": 2.0, "2.*": 0.5}}
    whole = lw.laplace(model, (x, y), likelihood, **options)
    la = lw.laplace(model, (x[:4], y[:4]), likelihood, **options)
    before, new = la.log_evidence(), draw(3, 3)
    updated = la.updated((x[4:8], y[4:8])).updated(DataLoader(TensorDataset(x[8:], y[8:]), batch_size=2))
    assert_same(updated, whole, new)
    assert la.state.n == 4
    close(la.log_evidence(), before, 0.0)
    assert la.tuned(center="map").updated((x[4:], y[4:])).tuning is None


def test_updating_checks_the_new_data_and_changes_nothing_on_an_error() -> None:
    model, x, y, likelihood = problem("categorical")
    la = lw.laplace(model, (x, y), likelihood)
    before = la.log_evidence()
    for bad in ((x, y + 7), (x * torch.nan, y), (x[:0], y[:0])):
        with pytest.raises(lw.errors.InvalidValue):
            la.updated(bad)
    close(la.log_evidence(), before, 0.0)
    assert la.state.n == 11


def test_from_state_refuses_another_network_or_likelihood() -> None:
    model, x, y, likelihood = problem("gaussian")
    state = lw.laplace(model, (x, y), likelihood).state
    with pytest.raises(lw.errors.InvalidValue, match="categorical"):
        lw.from_state(state, model, 1.0, "categorical")
    with pytest.raises(lw.errors.InvalidValue, match="fit again"):  # curvature per output was not kept
        lw.from_state(state, model, 1.0, lw.likelihoods.Gaussian(torch.tensor([0.3, 0.8])))
    other = mlp()
    with pytest.raises(lw.errors.InvalidValue, match=r"0\.weight"):
        lw.from_state(state, other, 1.0, likelihood)
    with pytest.raises(lw.errors.InvalidValue, match=r"0\.weight|architecture"):
        lw.from_state(state, nn.Linear(3, 2).double(), 1.0, likelihood)


def test_training_on_does_not_move_a_fit() -> None:
    model, x, y, likelihood = problem("gaussian")
    fits = {name: lw.laplace(model, (x, y), likelihood, structure=s) for name, s in STRUCTURES.items()}
    fresh = {name: lw.laplace(model, (x, y), likelihood, structure=s) for name, s in STRUCTURES.items()}
    expected = {name: (la.log_evidence(), la.predict(x).covariance) for name, la in fits.items()}
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1.0)
    for name, la in fresh.items():  # nothing of it was computed before the weights moved
        close(la.log_evidence(), expected[name][0], 1e-12)
        close(la.predict(x).covariance, expected[name][1], 1e-12)


# -- randomness --------------------------------------------------------------------------------------------------


def rng_state() -> tuple:
    keys = np.random.get_state()  # noqa: NPY002 - the state that a user has
    return torch.get_rng_state().tolist(), keys[1].tolist(), keys[2], random.getstate()


class Noisy(Dataset):
    """Draws from every global generator, as augmentations do, and makes nothing of it."""

    def __init__(self, n: int = 7) -> None:
        self.n = n

    def __len__(self) -> int:
        return self.n

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = torch.rand(()) + np.random.rand() + random.random()  # noqa: NPY002
        return torch.arange(3, dtype=torch.float64) + i + 0.0 * noise, torch.ones(2, dtype=torch.float64)


class Stream(IterableDataset):
    def __iter__(self):
        return (Noisy()[i] for i in range(7))


@pytest.mark.parametrize("data", ["shuffled", "noisy", "stream", "own generator"])
@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
def test_the_users_random_state_is_left_as_it_was(data: str, structure: str) -> None:
    model = mlp()
    own = torch.Generator().manual_seed(3)
    loader: object = {
        "shuffled": DataLoader(TensorDataset(draw(7, 3), draw(7, 2)), batch_size=2, shuffle=True),
        "noisy": Noisy(),
        "stream": DataLoader(Stream(), batch_size=3),
        "own generator": DataLoader(TensorDataset(draw(7, 3), draw(7, 2)), batch_size=2, shuffle=True, generator=own),
    }[data]
    before, mine = rng_state(), own.get_state()
    la = lw.laplace(model, loader, "gaussian", structure=STRUCTURES[structure], factor="monte_carlo")
    la = la.updated(loader)
    _ = la.tuned(center="map"), la.draw(2)
    _ = la.predict(draw_without_rng(), via="network").sample(3), la(draw_without_rng()).total
    assert rng_state() == before
    assert torch.equal(own.get_state(), mine)


def draw_without_rng() -> Tensor:
    return torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3)


def test_the_users_random_state_is_left_as_it_was_by_an_error() -> None:
    class Failing(Noisy):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(i)
            return (x * torch.nan if i == 5 else x), y

    model = mlp()
    before = rng_state()
    with pytest.raises(lw.errors.InvalidValue) as caught:
        lw.laplace(model, DataLoader(Failing(), batch_size=2, shuffle=True), "gaussian")
    assert rng_state() == before  # while the error still holds the pass that it stopped
    torch.rand(3), random.random()
    after = rng_state()
    del caught
    assert rng_state() == after  # and letting go of it moves nothing back


def test_a_pass_draws_anew_for_each_batch() -> None:
    """The random state is kept for the user, not rewound within a pass: draws differ between batches."""
    seen = []

    class Recording(Dataset):
        def __len__(self) -> int:
            return 4

        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            noise = torch.rand(3, dtype=torch.float64)
            seen.append((float(noise[0]), random.random(), float(np.random.rand())))  # noqa: NPY002
            return 0.0 * noise + i, torch.ones(2, dtype=torch.float64)

    lw.laplace(mlp(), DataLoader(Recording(), batch_size=1), "gaussian", structure="full")
    last = seen[-4:]  # the accumulating pass
    assert all(len({draws[k] for draws in last}) == 4 for k in range(3))


@pytest.mark.parametrize("structure", ["primal", "dual", "diag"])
@pytest.mark.parametrize("kind", ["gaussian", "categorical", "bernoulli"])
def test_the_same_generator_gives_the_same_monte_carlo_state(structure: str, kind: str) -> None:
    model, x, y, likelihood = problem(kind)

    def fit(generator: torch.Generator | None) -> lw.Laplace:
        return lw.laplace(
            model, (x, y), likelihood, structure=STRUCTURES[structure], factor="monte_carlo", generator=generator
        )

    a, b, c = (fit(torch.Generator().manual_seed(seed)) for seed in (5, 5, 6))
    torch.rand(7)  # the global state does not matter
    default, zero = fit(None), fit(torch.Generator().manual_seed(0))
    assert torch.equal(a.log_evidence(), b.log_evidence())
    assert not torch.equal(a.log_evidence(), c.log_evidence())
    assert torch.equal(default.log_evidence(), zero.log_evidence())
    assert torch.equal(a.predict(x).covariance, b.predict(x).covariance)
