"""The laws of transitions, on densities in closed form: what leaves them as they are, and what an unadjusted step does.

Chains that start at exact draws and end elsewhere are independent, so their moments have plain standard errors.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from helpers import close, normal, seeded
from lapwing.distributed import ALONE
from lapwing.errors import InvalidValue, LapwingWarning, NotConverged
from lapwing.samplers.adaptation import Adaptation, Stage
from lapwing.samplers.hmc import Hmc, Place, leapfrog
from lapwing.samplers.langevin import Langevin
from lapwing.samplers.mala import Mala, log_proposal
from lapwing.samplers.metropolis import Metropolis
from lapwing.samplers.minibatch import FLOOR, Minibatch
from lapwing.samplers.sghmc import Sghmc
from lapwing.samplers.sgld import Sgld
from lapwing.samplers.walk import Plan, Walk

Z = 4.5  # standard errors: a false alarm once in 100,000


@dataclass
class Density:
    """A target of one's own: log π of a row (d,)."""

    log_density: Callable[[Tensor], Tensor]
    joint: Any = field(default_factory=lambda: SimpleNamespace(prior=SimpleNamespace(discrete=False)))
    examples: Any = field(default_factory=lambda: SimpleNamespace(n=1))

    def value(self, q: Tensor) -> Tensor:
        return torch.func.vmap(self.log_density)(q)

    def value_and_grad(self, q: Tensor) -> tuple[Tensor, Tensor]:
        slope, value = torch.func.vmap(torch.func.grad_and_value(self.log_density))(q)
        return value, slope

    def noisy_value_and_grad(self, q: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return self.value_and_grad(q)

    split, temperature = 0, 1.0


@dataclass
class Stream:
    """All chains' numbers from one generator."""

    chains: int
    generator: torch.Generator
    ranks = ALONE

    def of_all(self, acceptance: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
        return acceptance, q

    def normal(self, *shape: int) -> Tensor:
        return torch.randn((self.chains, *shape), generator=self.generator, dtype=torch.float64)

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand((self.chains, *shape), generator=self.generator, dtype=torch.float64)

    def index(self, n: int, count: int) -> Tensor:
        return torch.randint(n, (self.chains, count), generator=self.generator)


def gaussian(d: int = 3, seed: int = 0) -> tuple[Density, Tensor, Tensor]:
    """A correlated normal, with its mean and covariance."""
    root, mean = normal(d, d, seed=seed) + 1.5 * torch.eye(d), normal(d, seed=seed + 1)
    precision = torch.linalg.inv(root @ root.mT)
    return Density(lambda q: -0.5 * (q - mean) @ precision @ (q - mean)), mean, root @ root.mT


def run(target: Any, kernel: Any, q: Tensor, steps: int, seed: int = 0, warmup: int = 0) -> Walk:
    walk = Walk(target, kernel, Plan(len(q), steps, warmup), Stream(len(q), seeded(seed)), None)  # type: ignore[arg-type]
    walk.run(q, progress=False)
    return walk


def check_moments(q: Tensor, mean: Tensor, covariance: Tensor) -> None:
    """Of independent rows."""
    n, deviation = len(q), covariance.diagonal().sqrt()
    assert float(((q.mean(0) - mean).abs() / deviation).max()) < Z / n**0.5
    away = (q - mean) / deviation
    correlation = covariance / deviation / deviation.unsqueeze(1)
    error = (away.unsqueeze(1) * away.unsqueeze(2)).std(0) / n**0.5
    assert float((((away.mT @ away) / n - correlation).abs() / error).max()) < Z


# -- adjusted: exact --------------------------------------------------------------------------------------------------


ADJUSTED = [Hmc(5, 0.7), Hmc(1, 1.2), Mala(1.0), Metropolis(0.9)]


@pytest.mark.parametrize("kernel", ADJUSTED, ids=str)
@pytest.mark.parametrize("seed", range(5))
def test_adjusted_samplers_started_at_exact_draws_stay_exact(kernel: Any, seed: int) -> None:
    target, mean, covariance = gaussian(seed=seed)
    start = mean + normal(4000, 3, seed=seed + 20) @ torch.linalg.cholesky(covariance).mT
    walk = run(target, kernel, start, 6, seed)
    check_moments(walk.state["q"], mean, covariance)
    acceptance = torch.stack(walk.told["acceptance"]).mean()
    assert 0.1 < float(acceptance) < 0.995  # or the law would be idle
    assert float((walk.state["q"] - start).norm(dim=1).mean()) > 0.3


@pytest.mark.parametrize("kernel", [Hmc(3, None), Mala(None), Metropolis(None)], ids=str)
def test_the_warm_up_finds_its_acceptance_and_the_variances(kernel: Any) -> None:
    target, _, _ = gaussian()
    scale = torch.tensor([0.1, 1.0, 3.0]).double()
    stretched = Density(lambda q: target.log_density(q / scale))
    walk = run(stretched, kernel, torch.zeros(40, 3).double(), 60, warmup=300)
    aim = kernel.adaptation.aim
    assert abs(float(torch.stack(walk.told["acceptance"]).mean()) - aim) < 0.15
    _, _, covariance = gaussian()
    ratio = walk.state["variance"] / (scale.square() * covariance.diagonal())
    assert float(ratio.min()) > 0.4
    assert float(ratio.max()) < 2.5


def test_a_step_that_is_given_is_not_moved() -> None:
    target, _, _ = gaussian()
    walk = run(target, Hmc(3, 0.3), torch.zeros(2, 3).double(), 5, warmup=30)
    assert float(walk.state["log_step"]) == math.log(0.3)
    assert bool((walk.state["variance"] == 1).all())


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(1, 5))])
def test_hmc_finds_the_moments_of_a_funnel_of_bounded_depth(seed: int) -> None:
    """v ~ N(0, 1), x ~ N(0, eᵛ): E v = 0, E x² = √e. Chains are independent, their means plain."""
    funnel = Density(lambda q: -0.5 * (q[0].square() + q[1].square() * (-q[0]).exp() + q[0]))
    walk = run(funnel, Hmc(8, None), torch.zeros(100, 2).double(), 100, seed, warmup=100)
    kept = torch.stack(walk.kept, 1)  # (k, draws, 2)
    for value, truth in ((kept[..., 0], 0.0), (kept[..., 0].square(), 1.0)):
        means = value.mean(1)
        assert abs(float(means.mean()) - truth) < Z * float(means.std()) / 10


# -- the leapfrog -----------------------------------------------------------------------------------------------------


def quartic(q: Tensor) -> Tensor:
    return -0.25 * q.square().square().sum() - 0.5 * (q @ q.roll(1)) - 0.3 * q.sum()


def place(q: Tensor, seed: int) -> Place:
    target = Density(quartic)
    return Place(q, normal(*q.shape, seed=seed), *target.value_and_grad(q))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_leapfrog_is_reversible(seed: int) -> None:
    target, at = Density(quartic), place(normal(4, 3, seed=seed), seed + 9)
    step, variance = torch.full((4, 1), 0.07).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    end = leapfrog(target.value_and_grad, at, step, variance, 25)
    back = leapfrog(target.value_and_grad, end._replace(momentum=-end.momentum), step, variance, 25)
    assert float((end.q - at.q).norm()) > 1
    close(back.q, at.q, 1e-10)
    close(-back.momentum, at.momentum, 1e-10)


def test_the_leapfrog_keeps_volumes() -> None:
    target, at = Density(quartic), place(normal(1, 3), 5)
    step, variance = torch.full((1, 1), 0.1).double(), torch.ones(3).double()

    def flow(z: Tensor) -> Tensor:
        end = leapfrog(target.value_and_grad, at._replace(q=z[None, :3], momentum=z[None, 3:],
                       gradient=target.value_and_grad(z[None, :3])[1]), step, variance, 7)  # fmt: skip
        return torch.cat([end.q[0], end.momentum[0]])

    jacobian = torch.func.jacrev(flow)(torch.cat([at.q[0], at.momentum[0]]))
    close(torch.linalg.det(jacobian), torch.ones(()).double(), 1e-10)


def test_the_leapfrogs_energy_error_is_of_second_order() -> None:
    """At a fixed length of the trajectory, |ΔH| falls as ε²."""
    target, at, variance = Density(quartic), place(normal(6, 3), 3), torch.ones(3).double()
    errors = []
    for n in (16, 32, 64, 128):
        end = leapfrog(target.value_and_grad, at, torch.full((6, 1), 1.0 / n).double(), variance, n)
        errors.append((end.energy(variance) - at.energy(variance)).abs().mean().log2())
    slopes = -torch.stack(errors).diff()
    assert bool(((slopes - 2).abs() < 0.1).all()), slopes


def test_one_leapfrog_step_is_a_langevin_step() -> None:
    """ε of Langevin is the square of the leapfrog's, and MALA's ratio is the gain in energy (identity 24)."""
    target, at = Density(quartic), place(normal(5, 3), 2)
    h, variance = torch.full((5, 1), 0.3).double(), torch.tensor([0.5, 1.0, 2.0]).double()
    end = leapfrog(target.value_and_grad, at, h, variance, 1)
    eps, noise = h.square(), at.momentum * variance.sqrt()
    close(end.q, at.q + 0.5 * eps * variance * at.gradient + (eps * variance).sqrt() * noise, 1e-12)
    back = log_proposal(at.q, end.q, end.gradient, eps, variance)
    forth = log_proposal(end.q, at.q, at.gradient, eps, variance)
    ratio = end.log_density + back - at.log_density - forth
    close(ratio, at.energy(variance) - end.energy(variance), 1e-10)


def test_mala_accepts_always_as_its_step_vanishes() -> None:
    target = Density(quartic)
    refused = []
    for step in (1e-1, 1e-3, 1e-6):
        walk = run(target, Mala(step), normal(200, 3), 3)
        refused.append(1 - float(torch.stack(walk.told["acceptance"]).mean()))
    assert refused[0] > refused[1] > refused[2]
    assert refused[2] < 1e-6


# -- unadjusted: as they should be off --------------------------------------------------------------------------------


STANDARD = Density(lambda q: -0.5 * q.square().sum())


@pytest.mark.parametrize("eps", [0.3, 1.0, 2.0])
@pytest.mark.parametrize("kind", ["langevin", "sgld"])
def test_langevin_steps_widen_a_normal(eps: float, kind: str) -> None:
    """The stationary variance is 1/(1 − ε/4) (identity 17)."""
    kernel: Any = Langevin(eps) if kind == "langevin" else Sgld(Minibatch(eps, 1))
    q = run(STANDARD, kernel, normal(4000, 2, seed=3), 60).state["q"].reshape(-1)
    want = 1 / (1 - eps / 4)
    assert abs(float(q.var()) - want) < Z * want * (2 / len(q)) ** 0.5
    assert want - 1 > Z * want * (2 / len(q)) ** 0.5  # or 1 would do


def stationary(M: Tensor, Q: Tensor) -> Tensor:
    """S = M S Mᵀ + Q, by its series."""
    S, power = torch.zeros_like(Q), torch.eye(len(M)).double()
    for _ in range(2_000):
        S, power = S + power @ Q @ power.mT, M @ power
    return S


@pytest.mark.parametrize("kind", ["langevin", "sgld", "sghmc"])
@pytest.mark.parametrize("seed", range(5))
def test_unadjusted_samplers_on_a_correlated_normal_have_the_covariance_of_their_recursion(
    kind: str, seed: int
) -> None:
    """Started at that, they stay there; it is not the target's own, whose covariance they had at ε → 0."""
    target, mean, covariance = gaussian(seed=seed)
    P, eye, a = torch.linalg.inv(covariance), torch.eye(3).double(), 0.4
    values, V = torch.linalg.eigh(P)
    eps = 1.5 / float(values[-1])
    kernel: Any = {
        "langevin": Langevin(eps),
        "sgld": Sgld(Minibatch(eps, 1)),
        "sghmc": Sghmc(Minibatch(eps, 1), a),
    }[kind]
    if kind == "sghmc":
        M = torch.cat([torch.cat([eye - eps * P / 2, (1 - a) * eye], 1), torch.cat([-eps * P / 2, (1 - a) * eye], 1)])
        S = stationary(M, a * eps * torch.ones(2, 2).double().kron(eye))
    else:
        S = stationary(eye - eps * P / 2, eps * eye)
    start = normal(4000, len(S), seed=seed + 20) @ torch.linalg.cholesky(S).mT
    walk = Walk(target, kernel, Plan(4000, 12, 0), Stream(4000, seeded(seed)), None)  # type: ignore[arg-type]
    walk._begin(mean + start[:, :3])
    if kind == "sghmc":
        walk.state["velocity"] = start[:, 3:]
    for t in range(12):
        walk.state, _ = kernel.step(target, walk.state, walk.streams, walk.plan.stage(t))
    along = V.mT @ S[:3, :3] @ V
    check_moments((walk.state["q"] - mean) @ V, torch.zeros(3).double(), along)
    wide = float(along[-1, -1] * values[-1])
    assert wide - 1 > Z * wide * (2 / 4000) ** 0.5  # or the target's own would do


@pytest.mark.parametrize(("eps", "friction"), [(0.5, 0.3), (0.2, 0.1), (1.0, 0.6)])
def test_sghmc_has_the_covariance_of_its_recursion(eps: float, friction: float) -> None:
    """z′ = M z + noise of a normal target: S = M S Mᵀ + Q, by its series."""
    a = friction
    M = torch.tensor([[1 - eps / 2, 1 - a], [-eps / 2, 1 - a]]).double()  # of (q, u)
    Q = a * eps * torch.ones(2, 2).double()
    S = stationary(M, Q)
    steps = int(math.log(1e-3) / math.log(float(torch.linalg.eigvals(M).abs().max()))) + 1
    state = run(STANDARD, Sghmc(Minibatch(eps, 1), a), normal(5000, 1), steps).state
    both = torch.cat([state["q"], state["velocity"]], 1)
    check_moments(both, torch.zeros(2).double(), S)


def test_sghmc_with_full_friction_is_sgld() -> None:
    target, _, _ = gaussian()
    start, by = normal(7, 3), Minibatch(0.1, 1)
    one, other = (run(target, kernel, start, 20).kept for kernel in (Sgld(by), Sghmc(by, 1.0)))
    close(torch.stack(one), torch.stack(other), 1e-12)


def test_sgld_is_langevin_on_all_data() -> None:
    target, _, _ = gaussian()
    one, other = (run(target, kernel, normal(7, 3), 20) for kernel in (Langevin(0.1), Sgld(Minibatch(0.1, 1))))
    assert torch.stack(one.kept).shape == torch.stack(other.kept).shape
    noise = Stream(7, seeded(0))
    q = normal(7, 3)
    for kept in one.kept:
        q = q + 0.05 * target.value_and_grad(q)[1] + 0.1**0.5 * noise.normal(3)
        close(kept, q, 1e-12)


def test_rmsprop_preconditions_step_and_noise() -> None:
    """Li et al. 2016, written out: V ← αV + (1 − α)(ĝ/n)², q ← q + ½εGĝ + √(εG)ξ."""
    target, _, _ = gaussian()
    target.examples.n = 4
    walk = run(target, Sgld(Minibatch(0.02, 2, rmsprop=0.9)), normal(5, 3), 4)
    noise, q, V = Stream(5, seeded(0)), normal(5, 3), torch.zeros(5, 3).double()
    for kept in walk.kept:
        noise.index(4, 2)
        g = target.value_and_grad(q)[1]
        V = 0.9 * V + 0.1 * (g / 4).square()
        G = 1 / (FLOOR + V.sqrt())
        q = q + 0.01 * G * g + (0.02 * G).sqrt() * noise.normal(3)
        close(kept, q, 1e-12)


def test_a_cycle_searches_cold_and_then_samples() -> None:
    by, plan = Minibatch(0.4, 1, cyclical=True), Plan(chains=2, draws=6, warmup=4, thin=2, cycles=2)
    assert plan.steps == 16
    assert [t for t in range(16) if plan.keeps(t)] == [3, 5, 7, 11, 13, 15]
    told = [by.at(plan.stage(t)) for t in range(16)]
    assert told[:8] == told[8:]
    assert [warm for _, warm in told[:8]] == [0, 0, 1, 1, 1, 1, 1, 1]
    close(torch.tensor([eps for eps, _ in told[:8]]), 0.2 * (1 + torch.cos(torch.pi * torch.arange(8) / 8)), 1e-6)
    with pytest.raises(InvalidValue, match="3 cycles need draws and warmup that they divide"):
        Plan(2, 9, 10, 1, 3)


# -- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_chain_that_diverges_is_stopped_and_named_and_keeps_its_draws() -> None:
    """−q⁴/4: steps from far out fly off, steps from near do not. Its place is still finite where it is stopped."""
    target = Density(lambda q: -0.25 * q.square().square().sum(), examples=SimpleNamespace(n=10_000))
    start = torch.tensor([[0.1], [15.0], [-0.2]]).double()
    with pytest.warns(LapwingWarning, match=r"chain 2 of langevin diverged in step 3 of 40: .* from -1.2\d+e\+04 to -"):
        walk = run(target, Langevin(0.02), start, 40)
    assert walk.lengths.tolist() == [40, 2, 40]
    assert float(torch.stack(walk.kept).abs().max()) < 100
    with pytest.warns(LapwingWarning, match=r"step 1 of 40: .* 0 draws so far"):  # in its warm-up
        assert run(target, Langevin(0.02), start * 2, 38, warmup=2).lengths.tolist() == [38, 0, 38]


@pytest.mark.parametrize("of", [Sgld, lambda by: Sghmc(by, 0.5)], ids=["sgld", "sghmc"])
def test_a_walk_that_goes_off_and_ends_with_finite_weights_has_diverged(of: Any) -> None:
    """Steps that fall to nothing over a cycle leave it where the first of them, too long, have thrown it."""
    kernel = of(Minibatch(40.0, 1, cyclical=True))
    with pytest.warns(LapwingWarning, match=rf"chain 1 of {kernel.name} diverged in step \d of 20"):
        walk = run(STANDARD, kernel, normal(1, 2), 20)
    assert int(walk.lengths) < 10


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_a_walk_from_far_out_that_comes_home_has_not_diverged(scale: float) -> None:
    """Nor has one whose step, as wide as is stable, leaves it wider than the target."""
    assert run(STANDARD, Sgld(Minibatch(3.9, 1)), scale * normal(50, 20), 100).lengths.tolist() == [100] * 50


def test_a_walk_ends_where_every_chain_has_diverged() -> None:
    target = Density(lambda q: -0.25 * q.square().square().sum())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", LapwingWarning)
        walk = run(target, Langevin(0.1), torch.full((2, 1), 50.0).double(), 1000, warmup=20)
    assert not walk.kept
    with pytest.raises(NotConverged, match="every chain of langevin diverged"):
        walk.fitted()


def test_a_proposal_that_is_not_finite_is_refused() -> None:
    """A trajectory that flies off ends with NaN: it is divergent, and the chain stays."""
    target = Density(quartic)
    walk = run(target, Hmc(8, 5.0), normal(3, 2), 4)
    assert bool(torch.stack(walk.told["divergent"]).all())
    assert bool((torch.stack(walk.told["acceptance"]) == 0).all())
    close(walk.state["q"], normal(3, 2))


@pytest.mark.parametrize("kernel", [Hmc(2, None), Mala(None), Metropolis(None)], ids=str)
def test_a_step_that_underflows_is_named(kernel: Any) -> None:
    nowhere = Density(lambda q: torch.where((q == 0).all(), 0.0, torch.nan) * (1 + q.sum()))
    with pytest.raises(NotConverged, match=rf"the step of {kernel.name} fell to .*warm-up step \d+"):
        run(nowhere, kernel, torch.zeros(2, 3).double(), 5, warmup=100)


@pytest.mark.parametrize("step", [0.0, 1e-13, -1.0, math.nan, math.inf, "small"])
def test_a_step_is_a_positive_number(step: Any) -> None:
    for make in (Langevin, lambda s: Minibatch(s, 1), lambda s: Adaptation(0.8, s)):
        with pytest.raises(InvalidValue, match="step"):
            make(step)


def test_settings_of_transitions_are_checked() -> None:
    for make in (lambda: Hmc(0, None), lambda: Sghmc(Minibatch(0.1, 1), 0.0), lambda: Minibatch(0.1, 0)):
        with pytest.raises(InvalidValue, match=r"leapfrog|friction|batch"):
            make()
    with pytest.raises(InvalidValue, match="rmsprop"):
        Minibatch(0.1, 1, rmsprop=1.5)
    with pytest.raises(InvalidValue, match="draws must be a whole number"):
        Plan(1, 0, 10)


def test_a_stage_knows_its_warm_up() -> None:
    assert [Stage(t, 2, 4).warming for t in range(4)] == [True, True, False, False]
