"""The drop-in's `lowrank` against dense eigenpairs of the Hessian, its `gp` against a dense Gaussian process."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.data import DataLoader, TensorDataset

from helpers import backward_rows, close, integers, normal
from lapwing.compat.laplace_torch import Laplace

N, M, PRIOR, NOISE = 13, 9, 0.7, 0.4


def network(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def data(likelihood: str, outputs: int = 2) -> tuple[Tensor, Tensor]:
    return normal(N, 3), normal(N, outputs, seed=1) if likelihood == "regression" else integers(2, N, seed=1)


def hessian(model: nn.Module, likelihood: str) -> Tensor:
    """Of −log p(D | θ) at unit noise, by two reverse passes."""
    x, y = data(likelihood)
    named = {n: p.detach() for n, p in model.named_parameters()}

    def loss(theta: Tensor) -> Tensor:
        pieces = theta.split([p.numel() for p in named.values()])
        params = {n: t.reshape(p.shape) for (n, p), t in zip(named.items(), pieces, strict=True)}
        f = functional_call(model, params, (x,))
        return (
            0.5 * (y - f).square().sum()
            if likelihood == "regression"
            else nn.functional.cross_entropy(f, y, reduction="sum")
        )

    return torch.autograd.functional.hessian(loss, torch.cat([p.reshape(-1) for p in named.values()]))


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("rank", [3, 10])
def test_low_rank_is_that_of_the_dense_hessian(likelihood: str, rank: int) -> None:
    model, x = network(), normal(5, 3, seed=3)
    noise = {"sigma_noise": NOISE} if likelihood == "regression" else {}
    options = {"backend_kwargs": {"low_rank": rank}, "prior_precision": PRIOR, "temperature": 1.3}
    la = Laplace(model, likelihood, "all", "lowrank", **noise, **options)
    la.fit(DataLoader(TensorDataset(*data(likelihood)), batch_size=5))
    values, vectors = torch.linalg.eigh(hessian(model, likelihood))
    top = values.abs().argsort(descending=True)[:rank]
    top = top[values[top] > 1e-6]
    H = vectors[:, top] * values[top] @ vectors[:, top].mT
    P = H / ((NOISE**2 if likelihood == "regression" else 1.0) * 1.3) + PRIOR * torch.eye(len(H)).double()
    U, l = la.H
    close(U * l @ U.mT, H)
    close(la.log_det_posterior_precision, torch.logdet(P))
    J = backward_rows(model(x), model.parameters())
    close(la._glm_predictive_distribution(x)[1], torch.einsum("ncp,pq,ndq->ncd", J, torch.linalg.inv(P), J))
    R = la._colored(torch.eye(len(P)).double()).mT
    close(R @ R.mT, torch.linalg.inv(P))
    again = Laplace(network(), likelihood, "all", "lowrank", **noise, **options)
    again.load_state_dict(la.state_dict())
    close(again.log_marginal_likelihood(), la.log_marginal_likelihood())


@pytest.mark.parametrize("likelihood", ["regression", "classification"])
@pytest.mark.parametrize("subset", ["all", "last_layer"])
@pytest.mark.parametrize("independent", [False, True])
def test_a_process_is_that_of_the_dense_kernel(likelihood: str, subset: str, independent: bool) -> None:
    """k** − K*ₘ (Kₘₘ + L⁻¹)⁻¹ Kₘ*, with the kernel between outputs, or without."""
    model, x_new = network(), normal(5, 3, seed=3)
    noise = {"sigma_noise": NOISE} if likelihood == "regression" else {}
    la = Laplace(
        model, likelihood, subset, "gp", n_subset=M, prior_precision=PRIOR, independent_outputs=independent, **noise
    )
    x, y = data(likelihood)
    la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
    chosen = np.random.default_rng(0).choice(list(range(N)), M, replace=False)
    weights = list(model.parameters()) if subset == "all" else list(model[2].parameters())
    J, K = (backward_rows(model(points), weights).flatten(0, 1) for points in (x[chosen], x_new))
    f = model(x[chosen]).detach()
    p = f.softmax(-1)
    L = torch.ones_like(f) / NOISE**2 if likelihood == "regression" else p * (1 - p)
    scale = M / N / PRIOR
    same = torch.arange(2).repeat(M)
    own = same[:, None] == same if independent else torch.ones(2 * M, 2 * M).bool()
    across = torch.arange(2).repeat(5)[:, None] == same if independent else torch.ones(10, 2 * M).bool()
    between = torch.arange(2).repeat(5)
    between = between[:, None] == between if independent else torch.ones(10, 10).bool()
    Kmm, Ksm, Kss = scale * (J @ J.mT) * own, scale * (K @ J.mT) * across, scale * (K @ K.mT) * between
    V = Kss - Ksm @ torch.linalg.solve(Kmm + (1 / L.reshape(-1)).diag(), Ksm.mT)
    close(la._glm_predictive_distribution(x_new, joint=True)[1], V)
    blocks = torch.stack([V[2 * i : 2 * i + 2, 2 * i : 2 * i + 2] for i in range(5)])
    close(la._glm_predictive_distribution(x_new)[1], blocks)
    root = L.reshape(-1).sqrt()
    inner = torch.eye(2 * M).double() + root[:, None] * Kmm * root
    constant = 2 * M * 2 * np.log(NOISE) if likelihood == "regression" else 0.0
    close(la.log_det_ratio, torch.logdet(inner) + constant)


def test_a_process_on_all_data_is_the_posterior_over_weights() -> None:
    x, y = data("regression")
    found = []
    for structure, more in (("gp", {"n_subset": N}), ("full", {})):
        la = Laplace(network(), "regression", "all", structure, sigma_noise=NOISE, prior_precision=PRIOR, **more)
        la.fit(DataLoader(TensorDataset(x, y), batch_size=4))
        found.append(la(normal(5, 3, seed=3)))
    close(found[0][0], found[1][0])
    close(found[0][1], found[1][1])
