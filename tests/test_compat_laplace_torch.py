"""The drop-in for laplace-torch against dense linear algebra; tests/peers/test_compat_matrix.py has the peer itself.

P = H / (σ² T) + A,     log p(D) = −L / (σ² T) − N C log(σ √2π) − ½ (log|P| − log|A| + ‖θ − m‖²_A)
"""

from __future__ import annotations

import copy
import math
from collections import UserDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from helpers import backward_rows, close, integers, normal
from lapwing.compat.laplace_torch import Laplace, marglik_training
from lapwing.compat.laplace_torch.curvature import CurvlinopsEF
from lapwing.compat.laplace_torch.predicting import normal_samples
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported

LIKELIHOODS = ("regression", "classification")
SUBSETS, STRUCTURES = ("all", "last_layer"), ("full", "kron", "diag")
PRIOR, NOISE, TEMPERATURE = 0.4, 0.6, 1.7


def network() -> nn.Module:
    """3 -> 4 -> 2, p = 26."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


def data(likelihood: str, n: int = 11) -> tuple[Tensor, Tensor]:
    return normal(n, 3), normal(n, 2, seed=1) if likelihood == "regression" else integers(2, n, seed=1)


def loader(likelihood: str, n: int = 11) -> DataLoader:
    return DataLoader(TensorDataset(*data(likelihood, n)), batch_size=4)


def fitted(likelihood: str, subset: str, structure: str, n: int = 11, **options: Any) -> Any:
    noise = {"sigma_noise": NOISE} if likelihood == "regression" else {}
    options = {"prior_precision": PRIOR, "temperature": TEMPERATURE} | noise | options
    la = Laplace(network(), likelihood, subset, structure, **options)
    la.fit(loader(likelihood, n))
    return la


def jacobian(la: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """J (n, c, p) of the Bayesian weights and f (n, c), by plain autograd."""
    f = la.model(x)
    return backward_rows(f, la.params), f.detach()


def middle(likelihood: str, f: Tensor) -> Tensor:
    if likelihood == "regression":
        return torch.eye(f.shape[-1]).double().expand(len(f), -1, -1)
    p = f.softmax(-1)
    return torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)


def curvature(la: Any, likelihood: str, structure: str, n: int = 11) -> Tensor:
    """What a structure keeps of H: with one example, kron is the exact block of each parameter tensor."""
    J, f = jacobian(la, data(likelihood, n)[0])
    H = torch.einsum("ncp,ncd,ndq->pq", J, middle(likelihood, f), J)
    if structure == "full":
        return H
    sizes = [p.numel() for p in la.params] if structure == "kron" else [1] * len(H)
    blocks = torch.block_diag(*[torch.ones(s, s).double() for s in sizes])
    return H * blocks


def precision(la: Any, likelihood: str, structure: str, n: int = 11) -> Tensor:
    scale = (NOISE**2 if likelihood == "regression" else 1.0) * TEMPERATURE
    return curvature(la, likelihood, structure, n) / scale + PRIOR * torch.eye(la.n_params).double()


CASES = [(s, h, 1 if h == "kron" else 11) for s in SUBSETS for h in STRUCTURES]


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("subset", "structure", "n"), CASES)
def test_the_evidence_is_that_of_the_dense_posterior(likelihood: str, subset: str, structure: str, n: int) -> None:
    la = fitted(likelihood, subset, structure, n)
    P = precision(la, likelihood, structure, n)
    x, y = data(likelihood, n)
    f = la.model(x).detach()
    theta = torch.cat([p.detach().reshape(-1) for p in la.params])
    if likelihood == "regression":
        fit = -0.5 * (y - f).square().sum() / (NOISE**2 * TEMPERATURE)
        fit = fit - n * 2 * math.log(NOISE * math.sqrt(2 * math.pi))
    else:
        fit = -nn.functional.cross_entropy(f, y, reduction="sum") / TEMPERATURE
    close(la.log_likelihood, fit)
    close(la.scatter, PRIOR * theta.square().sum())
    close(la.log_det_posterior_precision, torch.logdet(P))
    close(la.log_det_ratio, torch.logdet(P) - len(P) * math.log(PRIOR))
    close(la.log_marginal_likelihood(), fit - 0.5 * (la.log_det_ratio + la.scatter))
    found = la.posterior_precision
    close({"full": lambda: found, "kron": lambda: found.to_matrix(), "diag": lambda: found.diag()}[structure](), P)
    away = normal(len(theta), seed=3)
    normalized = -0.5 * away @ P @ away - 0.5 * len(P) * math.log(2 * math.pi) + 0.5 * torch.logdet(P)
    close(la.log_prob(theta + away), normalized)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("subset", "structure", "n"), CASES)
def test_predictions_have_the_covariance_of_the_dense_posterior(
    likelihood: str, subset: str, structure: str, n: int
) -> None:
    la, x = fitted(likelihood, subset, structure, n), normal(5, 3, seed=7)
    J, f = jacobian(la, x)
    S = torch.linalg.inv(precision(la, likelihood, structure, n))
    V = torch.einsum("ncp,pq,ndq->ncd", J, S, J)
    mean, var = la._glm_predictive_distribution(x)
    close(mean, f)
    close(var, V)
    close(la.functional_variance(J), V)
    joint = torch.einsum("ncp,pq,mdq->ncmd", J, S, J).reshape(10, 10)
    close(la.functional_covariance(J), joint)
    if likelihood == "regression":
        close(la(x)[1], V)
        close(la(x, joint=True)[1], joint)
        close(la(x, diagonal_output=True)[1], V.diagonal(dim1=1, dim2=2))
        return
    shrunk = f / (1 + math.pi / 8 * V.diagonal(dim1=1, dim2=2)).sqrt()
    close(la(x), shrunk.softmax(-1))
    torch.manual_seed(1)
    draws = la(x, link_approx="mc", n_samples=9)
    torch.manual_seed(1)
    close(draws, normal_samples(f, V, 9).softmax(-1).mean(0))


@pytest.mark.parametrize(("subset", "structure", "n"), [*CASES, ("subnetwork", "full", 11), ("subnetwork", "diag", 11)])
def test_draws_have_the_covariance_of_the_dense_posterior(subset: str, structure: str, n: int) -> None:
    """R z for the unit vectors z: R Rᵀ = P⁻¹."""
    index = {"subnetwork_indices": torch.tensor([1, 4, 13, 20])} if subset == "subnetwork" else {}
    la = fitted("regression", subset, structure, n, **index)
    if subset == "subnetwork":
        la_all = fitted("regression", "all", structure, n)
        P = precision(la_all, "regression", structure, n)[index["subnetwork_indices"]][:, index["subnetwork_indices"]]
    else:
        P = precision(la, "regression", structure, n)
    R = la._colored(torch.eye(len(P)).double()).mT
    close(R @ R.mT, torch.linalg.inv(P))
    draws = la.sample(3, torch.Generator().manual_seed(0))
    assert draws.shape == (3, 26 if subset != "last_layer" else 10)
    close(la.sample(3, torch.Generator().manual_seed(0)), draws)


def test_samples_through_the_network_leave_it_as_it_was() -> None:
    la, x = fitted("regression", "all", "kron"), normal(5, 3, seed=7)
    before = copy.deepcopy(la.model.state_dict())
    mean, var = la(x, pred_type="nn", link_approx="mc", generator=torch.Generator().manual_seed(2))
    f = []
    for theta in la.sample(100, torch.Generator().manual_seed(2)):
        moved = copy.deepcopy(la.model)
        nn.utils.vector_to_parameters(theta, moved.parameters())
        f.append(moved(x).detach())
    close(mean, torch.stack(f).mean(0))
    close(var, torch.stack(f).var(0))
    for name, value in la.model.state_dict().items():
        close(value, before[name])


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_evidence_has_the_gradient_of_its_value(structure: str) -> None:
    la = fitted("regression", "all", structure)
    at = {"prior": torch.tensor(0.8).double(), "noise": torch.tensor(0.5).double()}
    moving = {k: v.clone().requires_grad_() for k, v in at.items()}
    slopes = torch.autograd.grad(la.log_marginal_likelihood(moving["prior"], moving["noise"]), list(moving.values()))
    for name, slope in zip(at, slopes, strict=True):
        ends = [at | {name: at[name] + h} for h in (1e-5, -1e-5)]
        up, down = (la.log_marginal_likelihood(one["prior"], one["noise"]) for one in ends)
        close(slope, (up - down) / 2e-5, 1e-6)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_marglik_is_adam_on_the_log_precision(structure: str) -> None:
    la, other = fitted("classification", "all", structure), fitted("classification", "all", structure)
    la.optimize_prior_precision(prior_structure="layerwise", n_steps=7, lr=0.2)
    log = torch.zeros(4, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([log], lr=0.2)
    for _ in range(7):
        optimizer.zero_grad()
        (-other.log_marginal_likelihood(log.exp())).backward()
        optimizer.step()
    close(la.prior_precision, log.detach().exp())


def test_gridsearch_takes_the_least_loss_of_the_held_out_data() -> None:
    la, held = fitted("classification", "all", "kron"), loader("classification", 7)
    x, y = data("classification", 7)
    losses = []
    for value in torch.logspace(-4, 4, 9):
        la.prior_precision = value
        losses.append(float(nn.functional.nll_loss(la(x).log(), y)))
    la.optimize_prior_precision(method="gridsearch", val_loader=held, grid_size=9)
    best = torch.logspace(-4, 4, 9)[torch.tensor(losses).argmin()]
    close(la.prior_precision, best.double().reshape(1))
    with pytest.raises(InvalidValue, match="val_loader"):
        la.optimize_prior_precision(method="gridsearch")
    with pytest.warns(LapwingWarning, match="val_loader is not read"):
        la.optimize_prior_precision(n_steps=1, val_loader=held)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_a_fit_that_goes_on_is_one_over_both(structure: str) -> None:
    x, y = data("regression")
    la = Laplace(network(), "regression", "all", structure)
    la.fit(DataLoader(TensorDataset(x[:5], y[:5]), batch_size=3))
    la.fit(DataLoader(TensorDataset(x[5:], y[5:]), batch_size=4), override=False)
    whole = Laplace(network(), "regression", "all", structure)
    whole.fit(loader("regression"))
    close(la.log_marginal_likelihood(), whole.log_marginal_likelihood())
    close(la(x)[1], whole(x)[1])
    with pytest.raises(InvalidValue, match="override=False"):
        Laplace(network(), "regression", "last_layer", structure).fit(loader("regression"), override=False)


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
@pytest.mark.parametrize(("subset", "structure"), [(s, h) for s in SUBSETS for h in STRUCTURES])
def test_a_state_dict_holds_all_of_a_fit(likelihood: str, subset: str, structure: str, tmp_path: Any) -> None:
    la, x = fitted(likelihood, subset, structure, backend=CurvlinopsEF), normal(5, 3, seed=7)
    torch.save(la.state_dict(), tmp_path / "la.pt")
    again = Laplace(network(), likelihood, subset, structure, backend=CurvlinopsEF, temperature=TEMPERATURE)
    again.load_state_dict(torch.load(tmp_path / "la.pt"))  # plain: weights_only
    close(again.log_marginal_likelihood(), la.log_marginal_likelihood())
    close(again._glm_predictive_distribution(x)[1], la._glm_predictive_distribution(x)[1])
    other = Laplace(network(), likelihood, subset, "diag" if structure != "diag" else "full")
    with pytest.raises(InvalidValue, match="the saved state is of a"):
        other.load_state_dict(la.state_dict())


@pytest.mark.parametrize(("subset", "structure"), [(s, h) for s in SUBSETS for h in STRUCTURES])
def test_predictions_are_differentiable_in_inputs(subset: str, structure: str) -> None:
    la, x = fitted("regression", subset, structure, enable_backprop=True), normal(4, 3, seed=7)

    def value(x: Tensor) -> Tensor:
        mean, var = la(x)
        return mean.sum() + var.square().sum()

    moving = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad(value(moving), moving)
    for i, j in ((0, 0), (2, 1)):
        h = torch.zeros_like(x).index_put((torch.tensor(i), torch.tensor(j)), torch.tensor(1e-5).double())
        close(slope[i, j], ((value(x + h) - value(x - h)) / 2e-5).detach(), 1e-5)


class OnMapping(nn.Module):
    """A network that takes the whole batch."""

    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.net = kind, network()

    def forward(self, batch: Any) -> Tensor:
        assert isinstance(batch, self.kind)
        return self.net(batch["features"] * (batch["target"] > -1).unsqueeze(-1))


@pytest.mark.parametrize("kind", [dict, UserDict])
@pytest.mark.parametrize(("subset", "structure"), [("all", "kron"), ("all", "full"), ("last_layer", "diag")])
def test_mappings_reach_the_network_whole_and_in_their_class(kind: type, subset: str, structure: str) -> None:
    x, y = data("classification")
    rows = [{"features": a, "target": b} for a, b in zip(x, y, strict=True)]
    collate = lambda rows: kind({k: torch.stack([r[k] for r in rows]) for k in rows[0]})  # noqa: E731
    la = Laplace(OnMapping(kind), "classification", subset, structure, dict_key_x="features", dict_key_y="target")
    la.fit(DataLoader(rows, batch_size=4, collate_fn=collate))  # type: ignore[arg-type]
    plain = Laplace(network(), "classification", subset, structure)
    plain.fit(loader("classification"))
    close(la.log_marginal_likelihood(), plain.log_marginal_likelihood())
    close(la(collate(rows[:3])), plain(x[:3]))


class Reward(nn.Module):
    """One reward an item; pairs (n, 2, d) give two."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.flatten(0, 1)).reshape(len(x), 2) if x.ndim == 3 else self.net(x)


@pytest.mark.parametrize("structure", ["full", "diag"])
def test_reward_models_are_fitted_as_classes_and_predict_rewards(structure: str) -> None:
    pairs, y, x = normal(9, 2, 3), integers(2, 9), normal(5, 3, seed=4)
    la = Laplace(Reward(), "reward_modeling", "all", structure, prior_precision=PRIOR)
    la.fit(DataLoader(TensorDataset(pairs, y), batch_size=4))
    J, f = jacobian(la, pairs)
    H = torch.einsum("ncp,ncd,ndq->pq", J, middle("classification", f), J)
    P = (H if structure == "full" else H.diagonal().diag()) + PRIOR * torch.eye(la.n_params).double()
    K, g = jacobian(la, x)
    mean, var = la(x)
    close(mean, g)
    close(var, torch.einsum("ncp,pq,ndq->ncd", K, torch.linalg.inv(P), K))
    close(la(pairs, fitting=True).sum(-1), torch.ones(9).double())


@pytest.mark.parametrize("likelihood", LIKELIHOODS)
def test_training_under_the_evidence_raises_it(likelihood: str) -> None:
    model = network()
    la, trained, margliks, losses = marglik_training(
        model, loader(likelihood), likelihood, "diag", n_epochs=6, n_hypersteps=4, optimizer_kwargs={"lr": 1e-2}
    )
    assert trained is model
    assert len(margliks) == 24
    assert len(losses) == 6
    assert margliks[-1] < margliks[0]
    last = [margliks[i] for i in range(3, 24, 4)]
    close(-la.log_marginal_likelihood().detach(), torch.tensor(min(last), dtype=torch.float64), 1e-9)
    with pytest.warns(LapwingWarning, match="weight_decay"):
        marglik_training(network(), loader(likelihood), likelihood, n_epochs=1, optimizer_kwargs={"weight_decay": 1.0})


class Reads(Dataset):
    """Counts how often each example is read."""

    def __init__(self) -> None:
        self.x, self.y = data("regression")
        self.counts = [0] * len(self.x)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.counts[i] += 1
        return self.x[i], self.y[i]


def test_a_fit_reads_each_example_once() -> None:
    reads = Reads()
    la = Laplace(network(), "regression", "all", "kron")
    la.fit(DataLoader(reads, batch_size=4, shuffle=True))
    assert reads.counts == [1] * len(reads)
    close(la.loss, fitted("regression", "all", "kron").loss)


def test_what_cannot_be_had_raises_by_name() -> None:
    model = network()
    for call, error, words in (
        (lambda: Laplace(model, "counts"), InvalidValue, "'regression'.*got 'counts'"),
        (lambda: Laplace(model, "regression", "last_layer", "lowrank"), InvalidValue, "no last_layer with lowrank"),
        (lambda: Laplace(model, "classification", sigma_noise=0.3), InvalidValue, "sigma_noise belongs to regression"),
        (
            lambda: Laplace(model, "regression", "all", prior_precision=torch.ones(3)),
            InvalidValue,
            "4 or 26|1 value or 4",
        ),
        (lambda: Laplace(model, "regression", "all", backend=int), InvalidValue, "GGN, EF or Hessian.*got int"),
        (lambda: Laplace(model, "regression", "all", backend_kwargs={"x": 1}), Unsupported, r"backend_kwargs \['x'\]"),
        (
            lambda: Laplace(model, "regression", "all", "gp", functional_approximation="variational", n_subset=3),
            Unsupported,
            "'variational' is not carried over",
        ),
        (
            lambda: Laplace(model, "regression", "subnetwork", "full", subnetwork_indices=torch.tensor([4, 1])),
            InvalidValue,
            "must rise",
        ),
    ):
        with pytest.raises(error, match=words):
            call()
    with pytest.raises(AttributeError, match="not fitted"):
        Laplace(model, "regression", "all").log_marginal_likelihood()
    la = fitted("classification", "all", "kron")
    with pytest.raises(InvalidValue, match="link_approx='mc'"):
        la(normal(2, 3), pred_type="nn")
    with pytest.raises(InvalidValue, match="sigma_noise belongs"):
        la.log_marginal_likelihood(sigma_noise=torch.tensor(0.2))
    with pytest.warns(LapwingWarning, match="damping=True has no effect"):
        Laplace(model, "regression", "all", "kron", damping=True)


def test_draws_of_a_singular_variance_have_it() -> None:
    """Few weights under many outputs: laplace-torch's Cholesky root fails."""
    from lapwing.compat.laplace_torch.predicting import normal_samples

    root = torch.randn(4, 3, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    var, mean = root @ root.mT, torch.zeros(4, 3, dtype=torch.float64)
    drawn = normal_samples(mean, var, 200_000, torch.Generator().manual_seed(1))
    assert torch.allclose(torch.einsum("snc,snd->ncd", drawn, drawn) / len(drawn), var, atol=0.05 * float(var.max()))
