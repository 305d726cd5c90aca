"""EKFAC against dense autograd: exact second moments in the Kronecker eigenbasis, hence never further than KFAC.

H = Σ_n J_nᵀ Λ_n J_n is made here by reverse mode, one output at a time; where a layer's W[b, o, i] stands in the
parameter vector is worked out here too, from the shapes of weight and bias.
"""

from __future__ import annotations

import copy
import itertools
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lapwing as lw
from helpers import backward_rows, close, integers
from helpers import normal as numbers
from lapwing.curvature import Diagonal, EigenKronecker, Factor, Kronecker, accumulate
from lapwing.doctor.trial import counted
from lapwing.errors import InvalidValue, Unsupported
from lapwing.likelihoods import Categorical, Gaussian
from lapwing.operators import linalg
from lapwing.tangent import linearize

N, C = 7, 3
NOISE = torch.tensor([0.3, 1.7, 0.8], dtype=torch.float64)
SEEDS = (0, 1)


class Words(nn.Module):
    """Tokens, some repeated, through an embedding, a normalization layer and a map shared by positions."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4, padding_idx=1)
        self.norm = nn.LayerNorm(4)
        self.hidden = nn.Linear(4, 3)
        self.head = nn.Linear(3, C, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.embedding(x)
        return self.head(torch.tanh(self.hidden(self.norm(h + 0.3 * h.mean(1, keepdim=True)).sin())).mean(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, C))


def lenet() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(2, 4, (3, 2), padding=1, stride=(1, 2)),
        nn.Tanh(),
        nn.AvgPool2d(2),
        nn.Conv2d(4, 6, 2, groups=2, bias=False),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(12, 5),
        nn.Tanh(),
        nn.Linear(5, C),
    )


NETWORKS: dict[str, tuple[Any, Any]] = {
    "mlp": (mlp, lambda n, seed: numbers(n, 5, seed=seed)),
    "lenet": (lenet, lambda n, seed: numbers(n, 2, 6, 9, seed=seed)),
    "words": (Words, lambda n, seed: integers(6, n, 5, seed=seed)),
}
LIKELIHOODS: dict[str, Any] = {
    "categorical": Categorical(),
    "gaussian": Gaussian(0.6),
    "noise per output": Gaussian(NOISE),
}
PAIRS = [(kind, factor) for kind in LIKELIHOODS for factor in ("exact", "empirical")][:-1]  # per output: exact only


@cache
def network(name: str, seed: int = 0) -> nn.Module:
    net = NETWORKS[name][0]().double().eval()
    with torch.no_grad():
        for i, p in enumerate(net.parameters()):
            p.copy_(0.7 * numbers(*p.shape, seed=100 * seed + i))
    return net


def data(name: str, kind: str, n: int = N, seed: int = 0) -> tuple[Tensor, Tensor]:
    y = integers(C, n, seed=seed + 1) if kind == "categorical" else numbers(n, C, seed=seed + 1)
    return NETWORKS[name][1](n, seed + 2), y


def jacobian(net: nn.Module, x: Tensor) -> Tensor:
    """J (n, c, p)."""
    return backward_rows(net(x), net.parameters())


def ggn(net: nn.Module, x: Tensor, y: Tensor, likelihood: Any, factor: str = "exact") -> Tensor:
    """H (p, p), by formulas of Λ that stand here."""
    f = net(x).detach()
    if isinstance(likelihood, Categorical):
        p = torch.softmax(f, -1)
        middle = torch.diag_embed(p) - p.unsqueeze(-1) * p.unsqueeze(-2)
        score = torch.nn.functional.one_hot(y, C) - p
        scale = torch.ones(C, dtype=torch.float64)
    else:
        scale = likelihood.noise.expand(C) ** -2
        middle, score = torch.diag_embed(scale.expand_as(f)), (y - f) * scale
    if factor == "empirical":
        middle = score.unsqueeze(-1) * score.unsqueeze(-2)
    J = jacobian(net, x)
    return torch.einsum("nap,nab,nbq->pq", J, middle, J)


def layers(net: nn.Module) -> dict[str, Tensor]:
    """Layer -> where its W (b, o, i) stands in the parameter vector, (b, o, i)."""
    start, where = 0, {}
    for name, p in net.named_parameters():
        where[name] = torch.arange(start, start + p.numel()).reshape(p.shape)
        start += p.numel()
    out = {}
    for path, module in net.named_modules():
        if isinstance(module, nn.Linear):
            w = where[f"{path}.weight"].unsqueeze(0)
        elif isinstance(module, nn.Conv2d):
            w = where[f"{path}.weight"].permute(0, 2, 3, 1)  # offsets, then channels
            w = w.reshape(module.groups, module.out_channels // module.groups, -1)
        elif isinstance(module, nn.Embedding):
            w = where[f"{path}.weight"].mT.unsqueeze(0)
        else:
            continue
        if getattr(module, "bias", None) is not None:
            w = torch.cat([w, where[f"{path}.bias"].reshape(*w.shape[:2], 1)], -1)
        out[path] = w
    return out


def fit(
    name: str, kind: str, factor: str = "exact", structure: Any = "ekfac", seed: int = 0, **options: Any
) -> lw.Laplace:
    return lw.laplace(
        network(name, seed),
        data(name, kind, seed=seed),
        LIKELIHOODS[kind],
        structure=structure,
        factor=factor,
        **options,
    )


def dense(la: lw.Laplace) -> Tensor:
    """The curvature alone, (p, p)."""
    weights = la.likelihood.curvature_weights(la.state.factor.kind)
    return linalg.to_dense(la.state.structure.operator(la.state, weights.expand(la.state.terms)))


def part(matrix: Tensor, index: Tensor) -> Tensor:
    return matrix[index.reshape(-1).unsqueeze(-1), index.reshape(-1)]


# -- the definition ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("kind", "factor"), PAIRS)
@pytest.mark.parametrize("name", NETWORKS)
def test_never_further_than_kfac_and_exact_in_its_basis(
    name: str, kind: str, factor: str, seed: int, sharing: str
) -> None:
    H = ggn(network(name, seed), *data(name, kind, seed=seed), LIKELIHOODS[kind], factor)
    ekfac = fit(name, kind, factor, EigenKronecker(sharing=sharing), seed)
    E, K = dense(ekfac), dense(fit(name, kind, factor, Kronecker(sharing=sharing), seed))
    mask = torch.zeros_like(H, dtype=torch.bool)
    for layer, index in layers(network(name, seed)).items():
        h, e, k = (part(m, index) for m in (H, E, K))
        assert float((h - e).norm()) <= float((h - k).norm()) + 1e-12 * float(h.norm())
        ub, ua = ekfac.state.basis[f"{layer}/UB"], ekfac.state.basis.get(f"{layer}/UA")
        ua = torch.eye(index.shape[-1], dtype=torch.float64).expand(len(ub), -1, -1) if ua is None else ua
        U = torch.block_diag(*[torch.kron(b.contiguous(), a.contiguous()) for b, a in zip(ub, ua, strict=True)])
        close(U.mT @ U, torch.eye(len(U), dtype=torch.float64))
        close(U.mT @ e @ U, (U.mT @ h @ U).diagonal().diag())  # diagonal there, and the true one
        turned = U.mT @ k @ U
        close(turned, turned.diagonal().diag())  # the eigenvectors are those of KFAC
        close(e.trace(), h.trace())
        mask |= _outer(index, len(H))
    rest = H if name != "words" else part(H, _norm())
    if name == "words":  # the normalization layer keeps the exact blocks that kron gives it
        close(part(E, _norm()), part(K, _norm()))
        close(part(E, _norm()).diagonal(), rest.diagonal())
        mask |= _outer(_norm(), len(H))
    assert float(E[~mask].abs().sum()) == 0


def _outer(index: Tensor, p: int) -> Tensor:
    mask = torch.zeros(p, dtype=torch.bool)
    mask[index.reshape(-1)] = True
    return mask.unsqueeze(-1) & mask


def _norm() -> Tensor:
    return torch.arange(24, 32)


@pytest.mark.parametrize("kind", ["gaussian", "noise per output"])
@pytest.mark.parametrize("case", ["one layer", "deep linear", "one example"])
def test_the_exact_block_where_kfac_is(case: str, kind: str) -> None:
    if case == "one example":
        net, (x, y) = network("mlp"), data("mlp", kind, 1)
    else:
        widths = (5, C) if case == "one layer" else (5, 4, 2, C)
        net = nn.Sequential(*[nn.Linear(i, o) for i, o in itertools.pairwise(widths)]).double()
        x, y = data("mlp", kind)
    H = ggn(net, x, y, LIKELIHOODS[kind])
    for structure in ("kron", "ekfac"):
        la = lw.laplace(net, (x, y), LIKELIHOODS[kind], structure=structure, factor="exact")
        for index in layers(net).values():
            close(part(dense(la), index), part(H, index))


def test_the_second_pass_draws_anew_from_the_generator_and_leaves_the_users_alone() -> None:
    before = torch.get_rng_state()
    first, again, other = (
        fit("mlp", "categorical", Factor("monte_carlo", 2), generator=torch.Generator().manual_seed(seed))  # type: ignore[arg-type]
        for seed in (3, 3, 4)
    )
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(v, again.state.sums[k]) for k, v in first.state.sums.items())
    assert not torch.equal(first.state.sums["0/values"], other.state.sums["0/values"])


def test_monte_carlo_is_right_in_expectation() -> None:
    """Draws of the second pass are independent of those that chose the basis; 5 standard errors over 80 runs."""
    tangent, xy = linearize(network("mlp")), data("mlp", "categorical")
    basis = accumulate(Kronecker(), tangent, Categorical(), xy)
    exact = accumulate(EigenKronecker(), tangent, Categorical(), xy, basis=basis).sums["2/values"]
    generator = torch.Generator().manual_seed(0)
    run = [
        accumulate(
            EigenKronecker(), tangent, Categorical(), xy, Factor("monte_carlo", 4), basis=basis, generator=generator
        )
        for _ in range(80)
    ]
    values = torch.stack([state.sums["2/values"] for state in run])
    error = values.std(0) / len(run) ** 0.5
    assert bool(((values.mean(0) - exact).abs() <= 5 * error + 1e-10).all())


# -- what follows from it -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prior", [1.3, "layerwise"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
@pytest.mark.parametrize("name", NETWORKS)
def test_evidence_predictions_and_effective_dimension(name: str, kind: str, prior: Any) -> None:
    la = fit(name, kind, prior=prior)
    if prior == "layerwise":
        groups = torch.linspace(0.4, 2.0, la.prior.precision.numel(), dtype=torch.float64)
        la = la.replace(prior=la.prior.replace(precision=groups.reshape(la.prior.precision.shape)))
    a = la.prior.operator().dense()
    M = dense(la) + a.diag()
    x, y = data(name, kind)
    f, theta = network(name)(x).detach(), torch.cat([p.detach().reshape(-1) for p in network(name).parameters()])
    if kind == "categorical":
        fit_term = torch.log_softmax(f, -1)[range(N), y].sum()
    else:
        fit_term = torch.distributions.Normal(f, la.likelihood.noise).log_prob(y).sum()
    expected = fit_term - 0.5 * (a * theta**2).sum() - 0.5 * (torch.logdet(M) - a.log().sum())
    close(la.log_evidence(), expected)
    gamma = 1 - a * torch.linalg.inv(M).diagonal()
    close(la.effective_dimension().sum(), gamma.sum())
    new = NETWORKS[name][1](4, 9)
    J = jacobian(network(name), new)
    close(la.predict(new).covariance, J @ torch.linalg.inv(M) @ J.mT)
    flat = J.flatten(0, 1)
    close(la.predict(new, joint=True).covariance.reshape(4 * C, -1), flat @ torch.linalg.inv(M) @ flat.mT)
    tight = lw.predict(la.posterior, la.likelihood, new, memory_budget=1_000)
    close(tight.covariance, la.predict(new).covariance)


def test_draws_have_the_posterior_covariance() -> None:
    la, n = fit("lenet", "categorical", prior=0.7), 20_000
    z = la.posterior.draw(n, torch.Generator().manual_seed(0)) - la.posterior.mean
    M = linalg.to_dense(la.posterior.precision)
    whitened = z @ torch.linalg.cholesky(M)  # N(0, I): its squared length is χ² of p·n
    p = len(M)
    assert abs(float(whitened.square().sum()) - n * p) <= 5 * (2 * n * p) ** 0.5
    gap = whitened.mT @ whitened / n - torch.eye(p, dtype=torch.float64)
    assert float(gap.abs().max()) <= 6 * (2 / n) ** 0.5


@pytest.mark.parametrize("method", ["evidence", "mackay"])
@pytest.mark.parametrize("kind", LIKELIHOODS)
def test_tuning_ends_at_a_stationary_point(kind: str, method: str) -> None:
    la = fit("mlp", kind).tuned(method, center="map")
    close(la.prior.precision.reshape(-1) * la.prior.scatter(la.tangent.theta), la.effective_dimension(), 1e-3)
    assert la.log_evidence() > fit("mlp", kind).log_evidence()


def test_noise_per_output_needs_no_other_pass() -> None:
    """The sums are at unit noise: another noise in the same basis is the exact diagonal of that noise's H."""
    la = fit("mlp", "noise per output")
    other = la.replace(likelihood=Gaussian(NOISE.flip(0)))
    H = ggn(network("mlp"), *data("mlp", "gaussian"), Gaussian(NOISE.flip(0)))
    for layer, index in layers(network("mlp")).items():
        U = torch.kron(la.state.basis[f"{layer}/UB"][0], la.state.basis[f"{layer}/UA"][0])
        close(U.mT @ part(dense(other), index) @ U, (U.mT @ part(H, index) @ U).diagonal().diag())
    noise = NOISE.clone().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda s: la.log_evidence(likelihood=Gaussian(s)), (noise,), eps=1e-6, atol=1e-6, rtol=1e-6
    )


# -- sums that add -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["categorical", "noise per output"])
@pytest.mark.parametrize("name", NETWORKS)
def test_neither_batches_nor_order_nor_shards_matter_in_a_shared_basis(name: str, kind: str) -> None:
    tangent, likelihood = linearize(network(name), example=data(name, kind)[0]), LIKELIHOODS[kind]
    x, y = data(name, kind)
    order = torch.tensor([3, 0, 6, 2, 5, 1, 4])
    factors = [accumulate(Kronecker(), tangent, likelihood, (x[i], y[i])) for i in (order[:3], order[3:])]
    whole = accumulate(EigenKronecker(), tangent, likelihood, (x, y), basis=factors[0] + factors[1])
    batches = [(x[i], y[i]) for i in order.split(2)]
    cut = accumulate(EigenKronecker(), tangent, likelihood, batches, basis=whole)
    shards = [accumulate(EigenKronecker(), tangent, likelihood, [batch], basis=whole) for batch in batches]
    added = shards[0] + shards[1] + shards[2] + shards[3]
    assert added.n == cut.n == whole.n == N
    for key, value in whole.sums.items():
        close(cut.sums[key], value)
        close(added.sums[key], value)
    for key, value in whole.statistics.items():
        close(added.statistics[key], value)
    alone = accumulate(EigenKronecker(), tangent, likelihood, batches)  # in a basis of its own: the same matrix
    weights = likelihood.curvature_weights("exact")
    ours, theirs = (linalg.to_dense(s.structure.operator(s, weights)) for s in (alone, whole))
    close(ours, theirs)


def test_states_in_different_bases_do_not_add() -> None:
    tangent, (x, y) = linearize(network("mlp")), data("mlp", "categorical")
    one, other = (accumulate(EigenKronecker(), tangent, Categorical(), (x[i], y[i])) for i in (slice(4), slice(4, 7)))
    with pytest.raises(InvalidValue, match=r"different eigenbases do not add.*basis=state"):
        one + other


def test_updated_stays_in_its_basis() -> None:
    x, y = data("lenet", "categorical")
    la = lw.laplace(network("lenet"), (x[:4], y[:4]), "categorical", structure="ekfac").updated((x[4:], y[4:]))
    expected = accumulate(EigenKronecker(), la.tangent, Categorical(), (x, y), basis=la.state)
    assert la.state.n == N
    for key, value in expected.sums.items():
        close(la.state.sums[key], value)


def test_a_basis_from_elsewhere_is_refused() -> None:
    tangent, xy = linearize(network("mlp")), data("mlp", "categorical")
    smaller = linearize(network("mlp"), ["4.*"])
    states = {
        s: accumulate(s, tangent, Categorical(), xy) for s in (Kronecker(), Kronecker(sharing="reduce"), Diagonal())
    }
    run = [EigenKronecker(), tangent, Categorical(), xy]
    with pytest.raises(InvalidValue, match="structure 'ekfac' or 'kron', got State"):
        accumulate(*run, basis=states[Diagonal()])  # type: ignore[misc]
    with pytest.raises(InvalidValue, match="sharing='expand'"):
        accumulate(*run, basis=states[Kronecker(sharing="reduce")])  # type: ignore[misc]
    with pytest.raises(InvalidValue, match="same network, subset"):
        accumulate(EigenKronecker(), smaller, Categorical(), xy, basis=states[Kronecker()])
    with pytest.raises(InvalidValue, match="two passes"):
        accumulate(Kronecker(), tangent, Categorical(), xy, basis=states[Kronecker()])
    factors = accumulate(Kronecker(), tangent, Gaussian(1.0), data("mlp", "gaussian"))
    with pytest.raises(InvalidValue, match="1 curvature weights and the likelihood 3"):
        accumulate(EigenKronecker(), tangent, Gaussian(NOISE), data("mlp", "gaussian"), basis=factors)


@pytest.mark.parametrize("kind", ["categorical", "noise per output"])
@pytest.mark.parametrize("name", NETWORKS)
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(name: str, kind: str, tmp_path: Path) -> None:
    la = fit(name, kind, prior="layerwise")
    la.save(tmp_path / "net")
    loaded = lw.load(tmp_path / "net", copy.deepcopy(network(name)))
    saved = replace(la, state=replace(la.state, memo=lw.curvature.Memo()))
    assert loaded.state.structure == saved.state.structure
    assert loaded.coverage == saved.coverage
    for what in ("sums", "basis", "statistics"):
        mine, theirs = getattr(saved.state, what), getattr(loaded.state, what)
        assert mine.keys() == theirs.keys()
        assert all(v.dtype == theirs[k].dtype and torch.equal(v, theirs[k]) for k, v in mine.items())
    assert torch.equal(loaded.log_evidence(), saved.log_evidence())
    new = NETWORKS[name][1](3, 5)
    assert torch.equal(loaded.predict(new).covariance, saved.predict(new).covariance)
    loaded.updated(data(name, kind)).state + loaded.state  # one basis


# -- memory, precision, priors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 1_000, 20_000])
@pytest.mark.parametrize("kind", ["categorical", "noise per output"])
@pytest.mark.parametrize("name", NETWORKS)
def test_the_memory_budget_does_not_matter(name: str, kind: str, budget: int) -> None:
    loose, x = fit(name, kind), data(name, kind)
    run = loose.tangent, loose.likelihood, x
    tight = accumulate(EigenKronecker(memory_budget=budget), *run, basis=loose.state)
    for key, value in loose.state.sums.items():
        close(tight.sums[key], value)


def test_the_second_pass_keeps_to_its_budget() -> None:
    """A layer shared by positions whose gradients are 8 × 6 × 40 × 30 numbers, half a megabyte, of which the sums take
    10 kB: what is alive beyond inputs, sums and basis stays within the budget, and without one goes far beyond it."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.head = nn.Linear(30, 40, bias=False), nn.Linear(40, 7)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.wide(x)).mean(1))

    net = Shared().double()
    x, y = numbers(8, 2, 30), integers(7, 8)
    tangent = linearize(net)
    basis = accumulate(EigenKronecker(), tangent, Categorical(), (x, y))
    known = [*net.parameters(), *tangent.params.values(), *basis.basis.values(), x]
    peaks = {
        budget: counted(
            lambda budget=budget: accumulate(
                EigenKronecker(memory_budget=budget), tangent, Categorical(), (x, y), basis=basis
            ),
            known,
        )[0]
        for budget in (2**16, 2**30)
    }
    fixed = sum(v.numel() * 8 for v in basis.sums.values()) + sum(u.numel() * 8 for u in basis.basis.values())
    assert peaks[2**16] <= fixed + 2**16 + 3 * 8 * x.numel()
    assert peaks[2**30] > 4 * peaks[2**16]


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-4), (torch.bfloat16, 0.1)])
@pytest.mark.parametrize("name", NETWORKS)
def test_lower_precision_is_near(name: str, dtype: torch.dtype, tolerance: float) -> None:
    x, y = data(name, "categorical")
    x = x if name == "words" else x.to(dtype)
    exact = fit(name, "categorical")
    net = copy.deepcopy(network(name)).to(dtype)
    state = accumulate(EigenKronecker(), linearize(net, example=x), Categorical(), (x, y), basis=exact.state)
    for key, value in exact.state.sums.items():
        if key.endswith("values"):
            assert state.sums[key].dtype == torch.float64
            assert float((state.sums[key] - value).norm()) <= tolerance * float(value.norm())


@pytest.mark.parametrize(
    "prior",
    [
        lw.priors.Gaussian(0.4, per="unit"),
        lw.priors.Gaussian(torch.full((71,), 0.4, dtype=torch.float64), per="weight"),
        {"*.weight": 1.0, "*.bias": 2.0},
    ],
    ids=["unit", "weight", "weight and bias apart"],
)
def test_a_prior_that_varies_within_a_layer_is_refused(prior: Any) -> None:
    la = lw.laplace(network("mlp"), data("mlp", "categorical"), "categorical", structure="ekfac")
    assert la.tangent.layout.size == 75
    if getattr(prior, "per", None) == "weight":
        prior = lw.priors.Gaussian(torch.linspace(0.4, 0.9, 75, dtype=torch.float64), per="weight")
    la = la.replace(prior=prior)
    for verb in (la.log_evidence, la.draw, la.tuned, lambda: la.predict(data("mlp", "categorical")[0])):
        with pytest.raises(Unsupported, match=r"varies within [04]; use one precision, or one a layer.*'kron'.*'diag'"):
            verb()


def test_names_and_coverage() -> None:
    la = fit("words", "categorical")
    assert str(la.state.structure) == "ekfac"
    assert str(EigenKronecker(sharing="reduce")) == "ekfac (reduce)"
    assert la.coverage["hidden.weight"] == "diagonal in the Kronecker eigenbasis (Linear rule)"
    assert la.coverage["norm.weight"] == "exact block (LayerNorm rule)"
    with pytest.raises(InvalidValue, match="factor='hessian' needs structure='full'"):
        fit("mlp", "categorical", "hessian")
    with pytest.raises(InvalidValue, match="needs a basis"):
        EigenKronecker().start(la.tangent, la.likelihood, la.state.factor, None)  # type: ignore[arg-type]
