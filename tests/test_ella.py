"""ELLA: exact on the span of its anchors, below elsewhere, against the dense formula."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import close, draw
from lapwing import files

SEEDS = range(3)
EVERY = 10_000  # anchors: all rows


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()  # p = 57
    if kind == "images":
        net = nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
        return net, draw(9, 2, 5, 6), torch.randint(2, (9, 2)), lw.likelihoods.Bernoulli()
    if kind == "sequences":
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return net, draw(4, 3, 3), torch.randint(2, (4, 3)), lw.likelihoods.Categorical()
    if kind == "classes":
        return net, draw(7, 5), torch.randint(3, (7,)), lw.likelihoods.Categorical()
    noise = torch.tensor([0.3, 0.8, 0.5]) if kind == "per output" else torch.tensor(0.4)
    return net, draw(7, 5), draw(7, 3), lw.likelihoods.Gaussian(noise.double())


def root(likelihood: lw.likelihoods.Likelihood, f: Tensor) -> Tensor:
    """Λ (m, c, c) at outputs f (m, c)."""
    if isinstance(likelihood, lw.likelihoods.Categorical):
        p = f.softmax(-1)
        return torch.diag_embed(p) - p[:, :, None] * p[:, None]
    if isinstance(likelihood, lw.likelihoods.Bernoulli):
        return torch.diag_embed(f.sigmoid() * (1 - f.sigmoid()))
    return torch.diag_embed(torch.ones_like(f) / likelihood.noise**2)


KINDS = ("classes", "gaussian", "per output", "images", "sequences")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("prior", [0.7, "layerwise"])
@pytest.mark.parametrize("seed", SEEDS)
def test_all_rows_and_full_rank_are_exact_on_the_training_span(kind: str, prior: object, seed: int) -> None:
    """Identity 14."""
    model, x, y, likelihood = problem(kind, seed)
    prior = lw.priors.Gaussian(0.7, per="layer") if prior == "layerwise" else prior
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=prior)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=EVERY, prior=prior)
    close(found.predict(x).covariance, full.predict(x).covariance)
    close(found.predict(x).f_mean, full.predict(x).f_mean)
    close(found.predict(x).mean, full.predict(x).mean)
    close(found.predict(x, joint=True).covariance, full.predict(x, joint=True).covariance)
    assert abs(found.share - 1) < 1e-10


@pytest.mark.parametrize("seed", SEEDS)
def test_off_the_span_only_the_prior_s_part_is_missing(seed: int, jacobian) -> None:
    """full − ELLA = J (A⁻¹ − VᵀV) Jᵀ: the prior covariance outside the anchors' span."""
    model, x, y, likelihood = problem("classes", seed)
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=0.7)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=EVERY, prior=0.7)
    new = draw(4, 5)
    J, v = jacobian(model, lambda twin: twin(new)), found.directions
    missing = J @ (torch.eye(57, dtype=torch.float64) / 0.7 - v.mT @ v) @ J.mT
    assert float(missing.diagonal(dim1=1, dim2=2).min()) > 1e-4
    close(full.predict(new).covariance - found.predict(new).covariance, missing)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("anchors", "rank"), [(6, 4), (5, 5), (EVERY, 3)])
def test_the_dense_formula(kind: str, anchors: int, rank: int, jacobian) -> None:
    """From the Jacobian by autograd, with the rows that the generator draws."""
    model, x, y, likelihood = problem(kind)
    found = lw.gp.ella(
        model, (x, y), likelihood, anchors=anchors, rank=rank, prior=0.7, generator=torch.Generator().manual_seed(4)
    )
    J = jacobian(model, lambda twin: twin(x))  # (n, ..., c, p)
    rows, p = J.reshape(-1, J.shape[-1]), J.shape[-1]
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(4))[:anchors].sort().values
    values, q = torch.linalg.eigh(rows[chosen] @ rows[chosen].mT / 0.7)
    v = (q[:, -rank:] / values[-rank:].sqrt()).mT @ rows[chosen] / 0.7
    psi = J.reshape(-1, J.shape[-2], p) @ v.mT  # (m, c, k)
    f = model(x).detach()
    middle = root(likelihood, f.reshape(-1, f.shape[-1]))
    g = torch.einsum("mak,mab,mbl->kl", psi, middle, psi) + torch.eye(rank)
    new = x.roll(1, -1)
    fresh = jacobian(model, lambda twin: twin(new)) @ v.mT
    close(found.predict(new).covariance, fresh @ torch.linalg.solve(g, fresh.mT))
    close(found.directions.mT @ found.directions, v.mT @ v)
    assert abs(found.share - float(values[-rank:].sum() / values.sum())) < 1e-10
    assert found.anchors == min(anchors, len(rows))


def test_more_rank_never_narrows_the_prior_part(jacobian) -> None:
    """ψψᵀ, the prior's variance in the span, grows with the rank."""
    model, x, y, likelihood = problem("classes")
    traces = []
    for rank in (1, 3, 8, 14):
        v = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=rank).directions
        traces.append(float((jacobian(model, lambda twin: twin(x)) @ v.mT).square().sum()))
    assert traces == sorted(traces)


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
def test_another_prior_or_noise_needs_no_pass(kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    other = lw.likelihoods.Gaussian(2 * likelihood.noise)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5, prior=0.7).replace(prior=3.0, likelihood=other)
    fresh = lw.gp.ella(model, (x, y), other, anchors=9, rank=5, prior=3.0)
    new = draw(3, 5)
    close(found.predict(new).covariance, fresh.predict(new).covariance)
    close(found.predict(new).total, fresh.predict(new).total)
    with pytest.raises(lw.errors.InvalidValue, match="this prior times any number"):
        found.replace(prior={"0.*": 1.0, "2.*": 2.0})
    with pytest.raises(lw.errors.InvalidValue, match="cannot serve"):
        found.replace(likelihood="categorical")


def test_batches_change_nothing() -> None:
    model, x, y, likelihood = problem("classes")
    options = {"anchors": 9, "rank": 5}
    whole = lw.gp.ella(model, (x, y), likelihood, **options)
    cut = lw.gp.ella(model, DataLoader(TensorDataset(x, y), batch_size=2), likelihood, memory_budget=2**16, **options)
    close(whole.predict(x).covariance, cut.predict(x).covariance)


def test_a_prediction_like_any_other() -> None:
    model, x, y, _ = problem("classes")
    found = lw.gp.ella(model, (x, y), "categorical", anchors=9, rank=5, subset="last_layer")
    lw.testing.check_posterior(found.posterior, x)
    pred = found(x)
    assert isinstance(pred, lw.Prediction)
    close(pred.total, pred.epistemic + pred.aleatoric)
    close(found.predict(x, link="probit").mean.sum(-1), torch.ones(7, dtype=torch.float64))
    assert pred.log_prob(y).shape == (7,)
    assert repr(found).startswith("Ella(categorical; rank 5 with ")
    assert "9 anchors; 21 parameters, 7 examples" in repr(found)


def test_the_network_and_the_random_state_stay_as_they_were() -> None:
    model, x, y, likelihood = problem("images")
    model.train()
    before, state = {k: v.clone() for k, v in model.state_dict().items()}, torch.get_rng_state()
    lw.gp.ella(model, (x, y), likelihood, anchors=6, rank=4).predict(x)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())


# -- evidence ----------------------------------------------------------------------------------------------------


def log_likelihood(likelihood: lw.likelihoods.Likelihood, f: Tensor, y: Tensor) -> Tensor:
    if isinstance(likelihood, lw.likelihoods.Categorical):
        return torch.distributions.Categorical(logits=f).log_prob(y).sum()
    if isinstance(likelihood, lw.likelihoods.Bernoulli):
        return torch.distributions.Bernoulli(logits=f).log_prob(y.double()).sum()
    return torch.distributions.Normal(f, likelihood.noise).log_prob(y).sum()


def flat(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


GROUPED = lw.priors.Gaussian({"0.*": 0.7, "[1-9].*": 2.1}, mean=0.3)


def precisions(model: nn.Module) -> Tensor:
    return torch.cat([torch.full_like(p, 0.7 if n[0] == "0" else 2.1).flatten() for n, p in model.named_parameters()])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rank", [4, EVERY])
def test_the_evidence_by_dense_algebra(kind: str, rank: int, jacobian) -> None:
    """log Z of the weights in the span, with a prior of groups and a mean, from the Jacobian by autograd."""
    model, x, y, likelihood = problem(kind)
    found = lw.gp.ella(model, (x, y), likelihood, anchors=6, rank=rank, prior=GROUPED)
    J, a, f = jacobian(model, lambda twin: twin(x)), precisions(model), model(x).detach()
    rows = J.reshape(-1, J.shape[-1])
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(0))[:6].sort().values
    values, q = torch.linalg.eigh(rows[chosen] / a @ rows[chosen].mT)
    v = ((q / values.sqrt()).mT @ rows[chosen] / a)[-rank:]
    close(v * a @ v.mT, torch.eye(len(v), dtype=torch.float64))
    psi = J.reshape(-1, *J.shape[-2:]) @ v.mT
    gram = torch.einsum("mak,mab,mbl->kl", psi, root(likelihood, f.reshape(-1, f.shape[-1])), psi)
    terms = found.decompose()
    close(terms.fit, log_likelihood(likelihood, f, y))
    close(terms.quadratic, (v * a @ (flat(model) - 0.3)).square().sum() / 2)
    close(terms.occam, torch.logdet(gram + torch.eye(len(v))) / 2)
    close(found.log_evidence(), terms.fit - terms.quadratic - terms.occam)
    inside = gram @ torch.linalg.inv(gram + torch.eye(len(v)))
    close(found.effective_dimension(), inside.trace().reshape(1))
    assert terms.bound == "upper bound of the full curvature's"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", SEEDS)
def test_at_full_rank_only_the_weights_outside_the_span_are_not_paid_for(kind: str, seed: int, jacobian) -> None:
    """The Occam term is the full curvature's; the quadratic is of the projection on the rows of J."""
    model, x, y, likelihood = problem(kind, seed)
    full = lw.laplace(model, (x, y), likelihood, structure="full", prior=GROUPED).decompose()
    found = lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=EVERY, prior=GROUPED).decompose()
    rows, a = jacobian(model, lambda twin: twin(x)).flatten(0, -2), precisions(model)
    away = flat(model) - 0.3
    projected = rows.mT @ torch.linalg.lstsq(rows / a @ rows.mT, rows @ away, driver="gelsd").solution / a
    close(found.fit, full.fit)
    close(found.occam, full.occam)
    close(found.quadratic, (a * projected.square()).sum() / 2, 1e-6)
    assert float(found.quadratic) < float(full.quadratic)


def test_the_evidence_falls_to_that_of_full_rank() -> None:
    """An upper bound: features that nest leave less and less out."""
    model, x, y, likelihood = problem("classes")
    fits = [lw.gp.ella(model, (x, y), likelihood, anchors=EVERY, rank=rank) for rank in (1, 4, 9, 16, 21)]
    values = [float(fit.log_evidence()) for fit in fits]
    assert values == sorted(values, reverse=True)
    assert values[-1] > float(lw.laplace(model, (x, y), likelihood, structure="full").log_evidence())


@pytest.mark.parametrize("kind", ["gaussian", "per output"])
def test_the_evidence_has_the_slopes_of_its_differences(kind: str) -> None:
    model, x, y, likelihood = problem(kind)
    fit = lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5, prior=0.7)

    def at(c: Tensor, noise: Tensor) -> Tensor:
        return fit.replace(prior=lw.priors.Gaussian(c), likelihood=lw.likelihoods.Gaussian(noise)).log_evidence()

    values = torch.tensor(1.3).double().requires_grad_(), likelihood.noise.clone().requires_grad_()
    assert torch.autograd.gradcheck(at, values)


# -- tuning ------------------------------------------------------------------------------------------------------


def fitted(kind: str, seed: int = 0, n: int = 40) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    """Data that the network knows something of, so that the evidence has a maximum inside of its bounds."""
    model, _, _, likelihood = problem(kind, seed)
    x = draw(n, 5)
    f = model(x).detach()
    y = (2 * f + 0.3 * draw(n, 3)).argmax(-1) if kind == "classes" else f + 0.4 * draw(n, 3)
    return model, x, y, likelihood


@pytest.mark.parametrize("kind", ["classes", "gaussian", "per output"])
@pytest.mark.parametrize("seed", SEEDS)
def test_tuning_finds_the_maximum_from_anywhere_without_data(kind: str, seed: int) -> None:
    model, x, y, likelihood = fitted(kind, seed)
    fit = lw.gp.ella(model, (x, y), likelihood, anchors=30, rank=8, prior=0.7)
    best = fit.tuned()
    assert best.tuning.method == "evidence"
    assert best.tuning.converged
    assert best.tuning.passes == 0
    assert repr(best).endswith("; tuned by evidence)")
    for c, noise in [(1e-3, 3.0), (50.0, 0.05)]:
        other = {} if kind == "classes" else {"likelihood": lw.likelihoods.Gaussian(noise * likelihood.noise)}
        again = fit.replace(prior=c, **other).tuned()
        close(again.log_evidence(), best.log_evidence(), 1e-7)
        close(again.prior.precision, best.prior.precision, 1e-3)
        close(again.predict(x[:3]).covariance, best.predict(x[:3]).covariance, 1e-3)
    for c in torch.logspace(-4, 4, 33).double():
        for s in [1.0] if kind == "classes" else torch.logspace(-0.5, 0.5, 9).double():
            other = {} if kind == "classes" else {"likelihood": lw.likelihoods.Gaussian(s * best.likelihood.noise)}
            moved = fit.replace(prior=c * best.prior.precision, **other).log_evidence()
            assert float(moved) <= float(best.log_evidence()) + 1e-6


def test_tuning_holds_what_is_fixed_and_the_ratios_of_groups() -> None:
    model, x, y, likelihood = fitted("gaussian")
    fit = lw.gp.ella(model, (x, y), likelihood, anchors=30, rank=8, prior={"0.*": 1.0, "2.*": 3.0})
    held = fit.tuned(fixed="precision")
    close(held.prior.precision, fit.prior.precision, 0.0)
    assert float(held.likelihood.noise) != float(likelihood.noise)
    assert held.tuning.fixed == ("precision",)
    moved = fit.tuned(fixed=("noise",))
    assert float(moved.likelihood.noise) == float(likelihood.noise)
    close(moved.prior.precision / moved.prior.precision[0], torch.tensor([1.0, 3.0]).double(), 1e-12)
    fresh = lw.gp.ella(model, (x, y), likelihood, anchors=30, rank=8, prior=moved.prior)
    close(moved.predict(x).covariance, fresh.predict(x).covariance)
    close(moved.log_evidence(), fresh.log_evidence())
    close(moved.directions.mT @ moved.directions, fresh.directions.mT @ fresh.directions)
    with pytest.raises(lw.errors.InvalidValue, match="names no hyperparameter"):
        fit.tuned(fixed="width")


# -- draws, files, comparisons -------------------------------------------------------------------------------------


def test_functions_are_draws_of_the_process_and_weights_lie_in_the_span(jacobian) -> None:
    model, x, y, likelihood = problem("classes")
    fit = lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5).replace(prior=3.0)
    functions = fit.function_samples(20_000, torch.Generator().manual_seed(1))
    values = functions(x[:2]).flatten(1)
    joint = fit.predict(x[:2], joint=True).covariance.reshape(6, 6)
    torch.testing.assert_close(values.mT.cov(), joint, rtol=0.05, atol=0.02 * float(joint.max()))
    drawn = fit.draw(3, torch.Generator().manual_seed(1))
    away = torch.cat([drawn[n].flatten(1) for n, _ in model.named_parameters()], 1) - flat(model)
    V = fit.directions
    close(away @ torch.linalg.pinv(V) @ V, away)
    again = fit.function_samples(3, torch.Generator().manual_seed(1))(x)
    J = jacobian(model, lambda twin: twin(x))
    close(again, model(x).detach() + torch.einsum("ncp,kp->knc", J, away))
    with pytest.raises(lw.errors.InvalidValue, match="at least 1"):
        fit.draw(0)


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_loaded_is_what_was_saved_to_the_last_bit(kind: str, tmp_path: Path) -> None:
    model, x, y, likelihood = problem(kind)
    fit = lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5, prior=GROUPED)
    tuned = fit.tuned(fixed="noise" if "noise" in likelihood.hyperparameters else ())
    for one in (fit, tuned):
        one.save(tmp_path / "file")
        back = lw.load(tmp_path / "file", model)
        assert isinstance(back, lw.gp.Ella)
        assert repr(back) == repr(one)
        assert back.tuning == one.tuning
        for what in ("f_mean", "covariance", "mean", "total"):
            assert torch.equal(getattr(back.predict(x), what), getattr(one.predict(x), what)), what
        close(back.log_evidence(), one.log_evidence(), 1e-12)  # by another route where a factorization is there
        assert torch.equal(back.draw(2)["0.weight"], one.draw(2)["0.weight"])
        close(back.tuned().prior.precision, one.tuned().prior.precision)
        back.save(tmp_path / "again")
        assert (tmp_path / "again").read_bytes() == (tmp_path / "file").read_bytes()
    with pytest.raises(lw.errors.InvalidValue, match="reads no data again"):
        lw.load(tmp_path / "file", model, data=(x, y))


FORGED: dict[str, tuple[Callable[[dict, dict], object], str]] = {
    "no direction": (lambda t, h: t.pop("structure.directions"), "no tensor 'structure.directions'"),
    "directions of fewer weights": (lambda t, h: t.update({"structure.directions": torch.ones(5, 3).double()}), "57"),
    "directions of less precision": (lambda t, h: t.update({"structure.directions": torch.ones(5, 57)}), "float64"),
    "fewer directions": (lambda t, h: t.update({"structure.directions": torch.ones(4, 57).double()}), "sums.gram"),
    "an infinite direction": (lambda t, h: t["structure.directions"][0].fill_(torch.inf), "infinite"),
    "a sum with NaN": (lambda t, h: t["sums.gram"].fill_(torch.nan), "NaN"),
    "no symmetry": (lambda t, h: t["sums.gram"][0, 0, 1].add_(9), "not symmetric"),
    "more features than anchors": (lambda t, h: h["structure"]["fields"].update(anchors=4), "5 features of 4 anchors"),
    "a share of all and more": (lambda t, h: h["structure"]["fields"].update(share=1.5), "share of 1.5"),
    "words for a number": (lambda t, h: h["structure"]["fields"].update(share="1"), "no float"),
    "the features of another prior": (lambda t, h: t["prior.precision"][0].mul_(2), "this prior times any number"),
    "another shell": (lambda t, h: h.update(kind="laplace"), "holds a 'laplace', and its structure is ella"),
    "a temperature": (lambda t, h: h.update(temperature=2.0), "temperature of 2"),
    "a stranger": (lambda t, h: h.update(more=1), "which nobody knows"),
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_a_file_that_does_not_belong_together_is_an_error(case: str, tmp_path: Path) -> None:
    model, x, y, likelihood = problem("classes")
    path = tmp_path / "file"
    lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5, prior=GROUPED).save(path)
    tensors, header = files.read(path, 2)
    change, says = FORGED[case]
    change(tensors, header)
    files.write(path, tensors, header)
    with pytest.raises(lw.errors.InvalidValue, match=rf"file is broken: .*({says}).*; save it again"):
        lw.load(path, model)


def test_a_file_of_laplace_is_not_ella_s_nor_one_that_is_cut_or_has_another_bit(tmp_path: Path) -> None:
    model, x, y, likelihood = problem("classes")
    path = tmp_path / "file"
    lw.laplace(model, (x, y), likelihood, structure="diag").save(path)
    tensors, header = files.read(path, 2)
    files.write(path, tensors, {**header, "kind": "ella"})
    with pytest.raises(lw.errors.InvalidValue, match="holds a 'ella', and its structure is diag"):
        lw.load(path, model)
    lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5).save(path)
    whole = path.read_bytes()
    for place in range(0, len(whole), 97):
        changed = bytearray(whole)
        changed[place] ^= 1 << place % 8
        for content in (changed, whole[:place]):
            path.write_bytes(content)
            with pytest.raises(lw.errors.InvalidValue):
                lw.load(path, model)


def test_it_is_compared_and_mixed_with_other_fits(tmp_path: Path) -> None:
    model, x, y, likelihood = problem("classes")
    fits = {
        "ella": lw.gp.ella(model, (x, y), likelihood, anchors=9, rank=5),
        "laplace": lw.laplace(model, (x, y), likelihood),
    }
    table = lw.compare(fits, (x, y))
    for name, fit in fits.items():
        close(torch.tensor(table[name].log_evidence), fit.log_evidence().float(), 1e-5)
    assert table["ella"].structure == "ella"
    assert "upper bound of the full curvature's: ella" in repr(table)
    both = lw.mixture(list(fits.values()))
    both.save(tmp_path / "file")
    back = lw.load(tmp_path / "file", model)
    assert torch.equal(back.predict(x).mean, both.predict(x).mean)
    with pytest.raises(lw.errors.Unsupported, match="draws functions"):
        both.draw(2)
    with pytest.raises(lw.errors.InvalidValue, match="weight subsets"):
        lw.compare({**fits, "last": lw.gp.ella(model, (x, y), likelihood, subset="last_layer")})


class Shrinking:
    """A loader that loses examples after its first passes."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.passes = x, y, 0

    def __iter__(self):
        self.passes += 1
        cut = len(self.x) if self.passes < 5 else 3
        yield self.x[:cut], self.y[:cut]


@pytest.mark.parametrize(
    ("error", "match", "call"),
    [
        (lw.errors.InvalidValue, "anchors.*at least 1", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, anchors=0)),
        (lw.errors.InvalidValue, "rank.*at least 1", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, rank=0)),
        (lw.errors.Unsupported, "gprior", lambda m, x, y, k: lw.gp.ella(m, (x, y), k, prior="gprior")),
        (lw.errors.InvalidValue, "labels|classes|below", lambda m, x, y, k: lw.gp.ella(m, (x, y + 5), k)),
        (lw.errors.InvalidValue, "NaN", lambda m, x, y, k: lw.gp.ella(m, (x / 0 * 0, y), k)),
        (lw.errors.InvalidValue, "NaN", lambda m, x, y, k: lw.gp.ella(m, (x, y), k).predict(x / 0 * 0)),
        (lw.errors.InvalidValue, "nn.Module", lambda m, x, y, k: lw.gp.ella(lambda x: x, (x, y), k)),
        (lw.errors.InvalidValue, "no example", lambda m, x, y, k: lw.gp.ella(m, (x, y), k).predict(x[:0])),
        (lw.errors.InvalidValue, "in another", lambda m, x, y, k: lw.gp.ella(m, Shrinking(x, y), k)),
    ],
)
def test_what_cannot_be_done_is_said(error: type[Exception], match: str, call) -> None:
    model, x, y, likelihood = problem("classes")
    with pytest.raises(error, match=match):
        call(model, x, y, likelihood)
