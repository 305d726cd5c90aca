"""Walks of samplers on networks: diagnostics, checkpoints to the bit, and what is refused."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import normal, seeded
from lapwing.errors import InvalidValue, LapwingWarning, Unsupported
from lapwing.priors import Bernoulli, Gamma, Gaussian, Hierarchical, Jeffreys
from lapwing.samplers import hmc, langevin, mala, metropolis, sghmc, sgld
from lapwing.samplers.journal import WalkJournal


def linear() -> tuple[nn.Module, Tensor, Tensor]:
    """Two weights, 20 examples."""
    x = normal(20, 2)
    return nn.Linear(2, 1, bias=False).double(), x, x @ normal(2, 1, seed=1) + 0.5 * normal(20, 1, seed=2)


def mlp() -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 2)).double()


# -- diagnostics ------------------------------------------------------------------------------------------------------


def test_rhat_tells_chains_that_disagree_on_weights_and_agree_on_functions() -> None:
    """Hidden units swapped in one chain: other weights, the same function."""
    pytest.importorskip("arviz")
    model = nn.Sequential(nn.Linear(1, 2), nn.Tanh(), nn.Linear(2, 1)).double()
    tangent, x = lw.linearize(model), normal(3, 1)
    draws = tangent.theta + 0.1 * normal(200, 7, seed=1)
    draws[:, 0] += 3
    swapped = draws[100:][:, [1, 0, 3, 2, 5, 4, 6]]
    chains = lw.posterior.Chains(tangent, torch.cat([draws[:100], swapped]), None, (100, 100))
    assert float(chains.diagnostics.rhat().max()) > 1.5
    assert float(chains.diagnostics.rhat(x).max()) < 1.05
    assert chains.diagnostics.ess(x).shape == (3, 1)
    assert float(chains.diagnostics.ess(x).min()) > 60
    data = chains.to_arviz()
    assert data.posterior["0.weight"].shape == (2, 100, 2, 1)


def test_arviz_holds_what_was_sampled_and_told() -> None:
    pytest.importorskip("arviz")
    model, x, y = linear()
    noisy = lw.likelihoods.Gaussian(noise=Gamma(2.0, 2.0))
    post = hmc(model, (x, y), noisy, prior=Hierarchical(), chains=2, draws=12, warmup=20, leapfrog=3)
    data = post.to_arviz()
    assert data.posterior["noise"].shape == (2, 12)
    assert data.posterior["scale"].shape == (2, 12, 1)
    assert {"acceptance_rate", "diverging", "energy", "lp"} <= set(data.sample_stats)


def test_without_arviz_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "arviz", None)
    chains = lw.posterior.Chains(lw.linearize(linear()[0]), normal(4, 2), None, (2, 2))
    for call in (chains.diagnostics.rhat, chains.to_arviz):
        with pytest.raises(Unsupported, match=r"lapwing\[mcmc\]"):
            call()


def test_chains_of_unequal_lengths() -> None:
    tangent = lw.linearize(linear()[0])
    chains = lw.posterior.Chains(tangent, normal(7, 2), None, (3, 1, 3))
    assert str(chains) == "3 chains of 3 draws, 1 of them stopped early"
    assert chains.by_chain(chains.weights).shape == (2, 3, 2)
    early = lw.posterior.Chains(tangent, normal(7, 2), None, (7, 0))
    assert str(early) == "2 chains of 7 draws, 1 of them stopped early"
    assert early.by_chain(early.weights).shape == (1, 7, 2)
    for lengths in ((3, 3), (8, -1), ()):
        with pytest.raises(InvalidValue, match="7 draws of chains"):
            lw.posterior.Chains(tangent, normal(7, 2), None, lengths)


def test_other_posteriors_have_no_chains() -> None:
    model, x, y = linear()
    joint = lw.log_joint(model, (x, y), "gaussian")
    post = joint.fitted(lw.posterior.Particles(joint.tangent, normal(4, 2)), "hand")
    with pytest.raises(Unsupported, match="has no chains"):
        post.diagnostics  # noqa: B018
    with pytest.raises(Unsupported, match="has no chains"):
        post.to_arviz()


# -- checkpoints ------------------------------------------------------------------------------------------------------


RESUMED: list[tuple[Callable[..., lw.Fitted], dict[str, Any]]] = [
    (hmc, {"leapfrog": 3}),
    (metropolis, {}),
    (sghmc, {"step": 1e-3, "rmsprop": 0.9, "batch": 4, "thin": 2}),
]


@pytest.mark.parametrize(("sampler", "options"), RESUMED, ids=["hmc", "metropolis", "sghmc"])
@pytest.mark.parametrize("stop", [10, 35])
def test_a_resumed_walk_is_the_uninterrupted_one_to_the_bit(
    sampler: Callable[..., lw.Fitted],
    options: dict[str, Any],
    stop: int,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, x, y = mlp(), normal(9, 2), normal(9, 2, seed=1)
    noisy = lw.likelihoods.Gaussian(noise=Gamma(2.0, 2.0))
    told: dict[str, Any] = {"chains": 2, "draws": 20, "warmup": 25, **options}
    whole = sampler(model, (x, y), noisy, generator=seeded(4), **told)
    write, path = WalkJournal.wrote, tmp_path / "walk"

    def stopped(self: WalkJournal, t: int, walk: Any) -> None:
        write(self, t, walk)
        if t == stop:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(WalkJournal, "wrote", stopped)
        with pytest.raises(KeyboardInterrupt):
            sampler(model, (x, y), noisy, generator=seeded(4), checkpoint=path, every=5, **told)
    assert path.exists()
    again = sampler(model, (x, y), noisy, generator=seeded(4), checkpoint=path, every=5, **told)
    assert not path.exists()
    assert torch.equal(again.posterior.weights, whole.posterior.weights)  # type: ignore[attr-defined]
    for kind in ("told", "latent"):
        found, wanted = getattr(again.posterior, kind), getattr(whole.posterior, kind)
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_the_checkpoint_of_another_walk_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = mlp(), normal(9, 2), normal(9, 2, seed=1)
    path, told = tmp_path / "walk", {"chains": 2, "draws": 4, "warmup": 4, "leapfrog": 2, "every": 2}
    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", lambda *a, **k: None)
        hmc(model, (x, y), "gaussian", checkpoint=path, **told)
    for other, word in (
        ({"prior": 3.0}, "prior's values"),
        ({"temperature": 0.5}, "temperature"),
        ({"leapfrog": 3}, "the method"),
        ({"generator": seeded(8)}, "generator"),
        ({"draws": 5}, "length of the walk"),
    ):
        with pytest.raises(InvalidValue, match=f"is of another walk: .*{word}"):
            hmc(model, (x, y), "gaussian", checkpoint=path, **{**told, **other})
    with pytest.raises(InvalidValue, match="the data"):
        hmc(model, (x, y + 1), "gaussian", checkpoint=path, **told)
    with pytest.raises(InvalidValue, match=r"sampler's checkpoint"):
        lw.load(path, model)
    with pytest.raises(InvalidValue, match="give checkpoint="):
        hmc(model, (x, y), "gaussian", every=3)


# -- refusals ---------------------------------------------------------------------------------------------------------


ALL = [hmc, mala, metropolis, *(partial(one, step=0.1) for one in (langevin, sgld, sghmc))]
NAMES = lambda one: getattr(one, "func", one).__name__  # noqa: E731


@pytest.mark.parametrize("sampler", ALL, ids=NAMES)
def test_an_improper_prior_is_refused(sampler: Callable[..., lw.Fitted]) -> None:
    model, x, y = linear()
    with pytest.raises(Unsupported, match=r"Jeffreys is improper.*prior\.penalty"):
        sampler(model, (x, y), "gaussian", prior=Jeffreys())


@pytest.mark.parametrize("sampler", [one for one in ALL if one is not metropolis], ids=NAMES)
def test_discrete_weights_are_for_a_sampler_without_gradients(sampler: Callable[..., lw.Fitted]) -> None:
    model, x, y = linear()
    with pytest.raises(Unsupported, match=r"follows a gradient, and the weights of Bernoulli have none.*metropolis"):
        sampler(model, (x, y), "gaussian", prior=Bernoulli(0.5))


def test_chains_that_diverge_keep_their_draws() -> None:
    model, x, y = linear()
    with pytest.warns(LapwingWarning, match="diverged in step"):
        post = langevin(model, (x, y), "gaussian", step=0.3, chains=2, draws=60, warmup=0)
    assert 0 < max(post.posterior.lengths) < 60  # type: ignore[attr-defined]


def test_a_chain_that_is_stopped_in_its_warm_up_is_counted(tmp_path: Path) -> None:
    class Cubed(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mT**3

    model, x = Cubed(1, 1, bias=False).double(), normal(20, 1)
    told: dict[str, Any] = {"step": 1e-3, "chains": 3, "draws": 10, "warmup": 2}
    with pytest.warns(LapwingWarning, match="chain 2 of langevin diverged in step 1 of 12: .* 0 draws"):
        post = langevin(model, (x, x / 8), "gaussian", start=torch.tensor([[0.1], [5.0], [-0.2]]).double(), **told)
    post.save(tmp_path / "post")
    for one in (post, lw.load(tmp_path / "post", model)):
        assert one.posterior.lengths == (10, 0, 10)  # type: ignore[attr-defined]
        assert "3 chains of 10 draws, 1 of them stopped early" in repr(one)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": 0.0}, "temperature"),
        ({"chains": 0}, "chains must be"),
        ({"draws": 2.5}, "draws must be"),
        ({"start": "anywhere"}, "start"),
        ({"start": torch.zeros(3, 2)}, r"weights \(4, 2\)"),
        ({"start": torch.full((4, 2), math.nan)}, "chain 1 starts where"),
        ({"prior": "gprior"}, "g-prior"),
        ({"generator": 3}, "generator"),
        ({"step": -1.0}, "step"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, Any], match: str) -> None:
    model, x, y = linear()
    with pytest.raises((InvalidValue, Unsupported), match=match):
        hmc(model, (x, y), "gaussian", **{"draws": 2, "warmup": 2, **options})


def test_a_network_that_mixes_its_batch_has_no_minibatches() -> None:
    class Mixing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) - self.layer(x).mean(0)

    model, x, y = Mixing().double(), normal(6, 2), normal(6, 1, seed=1)
    with pytest.raises(Unsupported, match="minibatches need data"):
        sgld(model, (x, y), "gaussian", step=0.1, draws=2, warmup=1)


def test_a_gaussian_prior_per_layer_and_a_subset() -> None:
    model, x, y = mlp(), normal(9, 2), normal(9, 2, seed=1)
    post = mala(
        model, (x, y), "gaussian", prior=Gaussian(1.0, per="layer"), subset="last_layer", chains=2, draws=5, warmup=20
    )
    assert post.tangent.layout.names == ("2.weight", "2.bias")
    assert torch.equal(post.draw(1)["2.bias"][0] * 0, torch.zeros(2).double())
