"""Posteriors of other kinds: particles, mixtures, processes, and the shell that all of them share.

Outputs    moments and nodes of a normal, of draws and of a blend against sums written out
Particles  the network itself at each draw, weighted
Mixture    p(y) = Σ_k w_k p_k(y);  identical members are one
"""

from __future__ import annotations

import copy
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from lapwing.errors import InvalidValue, Unsupported

G = torch.Generator


def network(seed: int = 0, outputs: int = 2) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, outputs)).double()


def points(seed: int = 1, n: int = 12, outputs: int = 2) -> tuple[Tensor, Tensor]:
    g = G().manual_seed(seed)
    return torch.randn(n, 3, generator=g).double(), torch.randn(n, outputs, generator=g).double()


def normal(seed: int, n: int = 4, c: int = 3) -> lw.outputs.Normal:
    g = G().manual_seed(seed)
    root = torch.randn(n, c, c, generator=g).double()
    return lw.outputs.Normal(torch.randn(n, c, generator=g).double(), root @ root.mT / c)


def draws(seed: int, s: int = 6, weighted: bool = False) -> lw.outputs.Draws:
    g = G().manual_seed(seed)
    w = torch.rand(s, generator=g).double() if weighted else None
    values = torch.randn(s, 4, 3, generator=g).double()
    return lw.outputs.Draws(values, log_weight=None if w is None else (w / w.sum()).log())


def particles(seed: int = 0, s: int = 5) -> lw.posterior.Particles:
    tangent = lw.linearize(network())
    g = G().manual_seed(seed)
    return lw.posterior.Particles(
        tangent, tangent.theta + 0.3 * torch.randn(s, tangent.layout.size, generator=g).double()
    )


def fitted(seed: int = 0, likelihood: object = None) -> lw.Fitted:
    target = lw.log_joint(network(), points(), "gaussian", 2.0)
    return target.fitted(particles(seed), "hand", likelihood)


# -- outputs -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(3))
def test_a_blend_has_the_moments_of_its_parts(seed: int) -> None:
    parts, w = (normal(seed), draws(seed, weighted=True), normal(seed + 9)), torch.tensor([0.2, 0.5, 0.3]).double()
    blend = lw.outputs.Blend(parts, w.log())
    mean = sum(a * one.mean for a, one in zip(w, parts, strict=True))
    assert_close(blend.mean, mean)
    second = 0.0
    for a, one in zip(w, parts, strict=True):
        second = second + a * (one.marginal + one.mean.unsqueeze(-1) * one.mean.unsqueeze(-2))
    assert_close(blend.covariance, second - mean.unsqueeze(-1) * mean.unsqueeze(-2))
    assert_close(blend.variance, blend.covariance.diagonal(dim1=-2, dim2=-1))
    nodes = blend.nodes(torch.arange(4), None)
    assert_close(nodes.log_weight.exp().sum(0), torch.ones(4).double())
    assert_close(nodes.average(nodes.f), mean, rtol=0, atol=0.02)


def test_weighted_draws_are_their_sums() -> None:
    some = draws(0, weighted=True)
    w = some.log_weight.exp()
    mean = torch.einsum("s,snc->nc", w, some.values)
    assert_close(some.mean, mean)
    spread = torch.einsum("s,snc->nc", w, (some.values - mean).square()) / (1 - w.square().sum())
    assert_close(some.variance, spread)
    assert_close(some.covariance.diagonal(dim1=-2, dim2=-1), spread)
    plain = lw.outputs.Draws(some.values)
    assert_close(plain.variance, some.values.var(0))
    again = lw.outputs.Draws(some.values, log_weight=torch.full((6,), -math.log(6)).double())
    assert_close(again.variance, plain.variance)


@pytest.mark.parametrize("make", [normal, draws])
def test_outputs_scale_move_and_cut_about_their_mean(make: object) -> None:
    some = make(0)  # type: ignore[operator]
    by = torch.randn(4, 3).double()
    assert_close(some.scaled(4.0).mean, some.mean)
    narrow = some.scaled(0.25).variance
    known = some.scaled(1.0).variance  # about a mean that is known then
    assert_close(narrow, 0.25 * known)
    assert_close(some.moved(by).mean, some.mean + by)
    assert_close(some.moved(by).variance, some.variance)
    assert_close(some[1:3].mean, some.mean[1:3])
    blend = lw.outputs.Blend((some, some.moved(by)), torch.tensor([0.5, 0.5]).double().log())
    assert_close(blend.scaled(0.0).variance, torch.zeros(4, 3).double(), rtol=0, atol=1e-12)
    assert_close(blend[1:3].variance, blend.variance[1:3])


def test_draws_come_with_their_sources() -> None:
    blend = lw.outputs.Blend((normal(0), draws(1)), torch.tensor([0.3, 0.7]).double().log())
    assert blend.sources == 7
    f, source = blend.sample(4000, G().manual_seed(0))
    share = float((source == 0).double().mean())
    assert abs(share - 0.3) < 5 * math.sqrt(0.21 / 4000)
    for k in range(6):
        assert torch.equal(f[source == 1 + k], draws(1).values[k].expand(int((source == 1 + k).sum()), 4, 3))


def test_unlike_outputs_do_not_blend() -> None:
    with pytest.raises(InvalidValue, match="one shape"):
        lw.outputs.Blend((normal(0, 4), normal(0, 5)), torch.zeros(2).double())


# -- predictions ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("likelihood", [lw.likelihoods.Categorical(), lw.likelihoods.Gaussian(0.4)])
@pytest.mark.parametrize("joint", [False, True])
def test_the_density_of_a_blend_is_that_of_its_parts(likelihood: lw.likelihoods.Likelihood, joint: bool) -> None:
    def made(seed: int) -> lw.outputs.Normal:
        g = G().manual_seed(seed)
        root = 0.3 * torch.randn(12, 12, generator=g).double()
        cov = (root @ root.mT).reshape(4, 3, 4, 3)
        each = lw.outputs.Normal(torch.randn(4, 3, generator=g).double(), cov, joint=True)
        return each if joint else lw.outputs.Normal(each.mean, each.marginal)

    parts, w = (made(0), made(1)), torch.tensor([0.4, 0.6]).double()
    blend = lw.Prediction(likelihood, lw.outputs.Blend(parts, w.log()))
    y = torch.tensor([0, 2, 1, 1]) if likelihood.classes else torch.randn(4, 3).double()
    each = torch.stack([lw.Prediction(likelihood, one).log_prob(y) for one in parts])
    assert_close(blend.log_prob(y), torch.logsumexp(each + (w.log() if joint else w.log()[:, None]), 0))
    if not joint:
        means = [lw.Prediction(likelihood, one).mean for one in parts]
        assert_close(blend.mean, w[0] * means[0] + w[1] * means[1], rtol=0, atol=1e-12)


def test_identical_parts_collapse_to_one() -> None:
    one = normal(0)
    blend = lw.outputs.Blend((one, one, one), torch.tensor([0.2, 0.3, 0.5]).double().log())
    y = torch.tensor([0, 2, 1, 1])
    for link in ("auto", "probit", "bridge"):
        a, b = (lw.Prediction(lw.likelihoods.Categorical(), f, link) for f in (one, blend))
        for field in ("mean", "epistemic", "aleatoric", "total", "entropy", "mutual_information"):
            assert_close(getattr(a, field), getattr(b, field))
        assert_close(a.log_prob(y), b.log_prob(y))
    a, b = (lw.Prediction(lw.likelihoods.Gaussian(0.4), f) for f in (one, blend))
    for field in ("mean", "std", "epistemic"):
        assert_close(getattr(a, field), getattr(b, field))
    assert_close(a.quantile(0.9), b.quantile(0.9))


def test_a_noise_for_each_draw_is_the_mixture_of_their_densities() -> None:
    some = draws(0, weighted=True)
    noises = torch.linspace(0.2, 1.5, 6).double()
    several = lw.likelihoods.Several(lw.likelihoods.Gaussian(1.0), {"noise": noises})
    pred, w = lw.Prediction(several, some), some.log_weight.exp()
    y = torch.randn(4, 3).double()
    density = torch.distributions.Normal(some.values, noises[:, None, None])
    assert_close(pred.log_prob(y), torch.logsumexp(w.log()[:, None] + density.log_prob(y).sum(-1), 0))
    assert_close(pred.cdf(y), torch.einsum("s,snc->nc", w, density.cdf(y)))
    assert_close(pred.aleatoric, (w * noises.square()).sum().expand(4, 3))
    assert_close(pred.cdf(pred.quantile(0.3)), torch.full((4, 3), 0.3).double())
    sampled = pred.sample(20_000, G().manual_seed(0))
    assert float((sampled.var(0) / (pred.outputs.scaled(1.0).variance + pred.aleatoric) - 1).abs().max()) < 0.06
    with pytest.raises(InvalidValue, match="6 likelihoods for 1 sources"):
        lw.Prediction(several, normal(0))


def test_members_of_a_mixture_keep_their_own_noise() -> None:
    x, y = points()
    a, b = (lw.laplace(network(), (x, y), lw.likelihoods.Gaussian(noise), prior=2.0) for noise in (0.3, 0.9))
    both, new = lw.mixture([a, b], [1.0, 3.0]), torch.randn(5, 3).double()
    target = torch.randn(5, 2).double()
    each = torch.stack([one.predict(new).log_prob(target) for one in (a, b)])
    w = torch.tensor([0.25, 0.75]).double()
    assert_close(both.predict(new).log_prob(target), torch.logsumexp(each + w.log()[:, None], 0))
    assert_close(both.predict(new).aleatoric, torch.full((5, 2), 0.25 * 0.09 + 0.75 * 0.81).double())
    mean, total = both(new).mean, both(new).total
    second = sum(a * (one(new).total + one(new).mean.square()) for a, one in zip(w, (a, b), strict=True))
    assert_close(total, second - mean.square())


# -- particles -----------------------------------------------------------------------------------------------------


def test_particles_are_the_network_at_each_of_them() -> None:
    post, new = particles(), torch.randn(7, 3).double()
    net = network()
    names = [name for name, _ in net.named_parameters()]
    for weights, f in zip(post.weights, post.outputs(new).values, strict=True):
        own = dict(zip(names, post.tangent.layout.unflatten(weights).values(), strict=True))
        assert_close(f, torch.func.functional_call(net, own, (new,)))


def test_particles_refuse_what_is_none() -> None:
    post = particles()
    for wrong, said in [
        (post.weights[:, :-1], "weight vectors"),
        (post.weights[:0], "weight vectors"),
        (post.weights * math.nan, "diverged"),
    ]:
        with pytest.raises(InvalidValue, match=said):
            lw.posterior.Particles(post.tangent, wrong)
    with pytest.raises(InvalidValue, match="log-weights"):
        lw.posterior.Particles(post.tangent, post.weights, torch.zeros(3).double())
    with pytest.raises(Unsupported, match="no evidence"):
        fitted().log_evidence()
    with pytest.raises(InvalidValue, match="cannot apply"):
        fitted().predict(torch.randn(2, 3).double(), link="probit")


def test_draws_of_particles_go_by_their_weights() -> None:
    post = particles()
    heavy = lw.posterior.Particles(post.tangent, post.weights, torch.tensor([0.1, 0.6, 0.1, 0.1, 0.1]).double().log())
    drawn = heavy.draw(3000, G().manual_seed(0))
    share = float((drawn == post.weights[1]).all(1).double().mean())
    assert abs(share - 0.6) < 5 * math.sqrt(0.24 / 3000)


def test_the_log_joint_is_its_sum() -> None:
    (x, y), net = points(), network()
    target = lw.log_joint(net, (x, y), lw.likelihoods.Gaussian(0.5), 2.0)
    theta = target.start + 0.1
    own = target.tangent.layout.unflatten(theta)
    f = torch.func.functional_call(net, own, (x,))
    expected = torch.distributions.Normal(f, 0.5).log_prob(y).sum()
    expected = expected + torch.distributions.Normal(0, 0.5**0.5).log_prob(theta).sum()
    assert_close(target(theta), expected)
    theta = target.start.clone().requires_grad_()
    target(theta).backward()
    assert theta.grad is not None
    assert bool(torch.isfinite(theta.grad).all())
    with pytest.raises(Unsupported, match="g-prior"):
        lw.log_joint(net, (x, y), "gaussian", "gprior")


@pytest.mark.parametrize("kind", ["laplace", "particles", "mixture", "process"])
def test_every_posterior_keeps_the_laws(kind: str) -> None:
    la, new = lw.laplace(network(), points(), "gaussian", prior=2.0), torch.randn(4, 3).double()
    tangent = la.tangent
    V = 0.1 * torch.randn(4, tangent.layout.size).double()

    def features(x: Tensor) -> tuple[Tensor, Tensor]:
        return tangent(x), torch.einsum("ncp,kp->knc", tangent.rows(x), V)

    made = {
        "laplace": la.posterior,
        "particles": particles(s=40),
        "mixture": lw.mixture([la, fitted()]).posterior,
        "process": lw.posterior.Process(tangent, features, torch.eye(4).double(), torch.ones(()).double()),
    }
    lw.testing.check_posterior(made[kind], new)


def test_a_posterior_that_breaks_a_law_is_told_which() -> None:
    class Wide(lw.posterior.Particles):
        def outputs(self, x: Tensor, joint: bool = False) -> lw.outputs.Draws:
            made = super().outputs(x, joint)
            return made.scaled(4.0) if joint else made

    with pytest.raises(lw.errors.BrokenLaw, match=r"breaks 1 law\(s\):\n  joint=True has the same marginals"):
        lw.testing.check_posterior(Wide(particles().tangent, particles(s=40).weights), torch.randn(4, 3).double())


# -- files and comparisons -----------------------------------------------------------------------------------------


def test_particles_come_back_from_a_file(tmp_path: Path) -> None:
    noise = {"noise": torch.linspace(0.2, 1.0, 5).double()}
    for fit in (fitted(), fitted(likelihood=lw.likelihoods.Several(lw.likelihoods.Gaussian(1.0), noise))):
        fit.save(tmp_path / "fit")
        back = lw.load(tmp_path / "fit", network())
        new, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
        assert torch.equal(back.predict(new).log_prob(y), fit.predict(new).log_prob(y))
        assert repr(back) == repr(fit)
        assert torch.equal(back.draw(2)["0.weight"], fit.draw(2)["0.weight"])
    with pytest.raises(InvalidValue, match="saved at other weights"):
        lw.load(tmp_path / "fit", network(5))


def test_a_mixture_comes_back_with_its_networks(tmp_path: Path) -> None:
    nets = [network(0), network(7)]
    both = lw.mixture(
        [lw.laplace(net, points(), "gaussian").tuned(center="map") for net in nets], torch.tensor([1.0, 2.0])
    )
    both.save(tmp_path / "both")
    other = copy.deepcopy(network(3))
    before = copy.deepcopy(other.state_dict())
    back = lw.load(tmp_path / "both", other)
    new, y = torch.randn(4, 3).double(), torch.randn(4, 2).double()
    assert_close(back.predict(new).log_prob(y), both.predict(new).log_prob(y), rtol=0, atol=0)
    assert all(torch.equal(before[k], v) for k, v in other.state_dict().items())
    with pytest.raises(InvalidValue, match="another architecture"):
        lw.load(tmp_path / "both", network(0, 3))


def test_fits_of_all_kinds_compare() -> None:
    la, held_out = lw.laplace(network(), points(), "gaussian", prior=2.0), points(9)
    fits = {"laplace": la, "particles": fitted(), "both": lw.mixture([la, la])}
    with pytest.raises(InvalidValue, match="pass data="):
        lw.compare(fits)
    table = lw.compare(fits, held_out)
    x, y = held_out
    for name, fit in fits.items():
        assert_close(table[name].nll, -float(fit.predict(x).log_prob(y).mean()))
    assert [row.nll for row in table.rows] == sorted(row.nll for row in table.rows)
    assert table["particles"].log_evidence is None
    assert_close(table["laplace"].log_evidence, float(la.log_evidence()))
    assert "5 particles" in repr(table)
    with pytest.raises(InvalidValue, match="likelihoods differ"):
        lw.mixture([la, lw.laplace(network(), (points()[0], torch.arange(12) % 2), "categorical")])
    for weights in ("evidence?", [1.0], [-1.0, 2.0], [0.0, 0.0]):
        with pytest.raises(InvalidValue, match="weights must be"):
            lw.mixture([la, la], weights)


def test_a_process_is_bayesian_regression_on_its_features() -> None:
    net, (x, _) = network(), points()
    tangent, new = lw.linearize(net), torch.randn(3, 3).double()
    V = torch.randn(4, tangent.layout.size).double()

    def features(x: Tensor) -> tuple[Tensor, Tensor]:
        return tangent(x), torch.einsum("ncp,kp->knc", tangent.rows(x), V)

    phi = features(x)[1]
    gram = torch.einsum("knc,jnc->kj", phi, phi)
    process = lw.posterior.Process(tangent, features, gram, torch.tensor(0.5).double())
    f, psi = features(new)
    cov = torch.einsum("knc,kj,jmd->ncmd", psi, torch.linalg.inv(gram + 0.5 * torch.eye(4).double()), psi)
    made = process.outputs(new, joint=True)
    assert_close(made.mean, f)
    assert_close(made.covariance, cov)
    assert_close(process.outputs(new).covariance, made.marginal)
    z = process.draw(20_000, G().manual_seed(0))
    assert_close(z.mT.cov(), torch.linalg.inv(process.precision), rtol=0.1, atol=0.02)
