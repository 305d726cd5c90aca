"""Sketched Lanczos: the score against J (I − VᵀV) Jᵀ with V in full, and the sketch and recursion that it rests on."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from helpers import close, draw
from lapwing.scores import Hartley
from lapwing.solvers.lanczos import krylov

SEEDS = range(3)
CPU = torch.device("cpu")


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(50 + seed)


# -- the sketch --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("p", [1, 2, 9, 16, 31])
def test_a_sketch_of_every_place_is_orthogonal(p: int) -> None:
    s = Hartley.drawn(p, p, seeded(p), CPU)(torch.eye(p, dtype=torch.float64)).mT
    close(s @ s.mT, torch.eye(p, dtype=torch.float64))


@pytest.mark.parametrize("p", [7, 12])
def test_a_sketch_is_the_hartley_transform(p: int) -> None:
    """cas(2π i j / p) = cos + sin, at the places, of the signed numbers."""
    sketch = Hartley.drawn(p, 5, seeded(p), CPU)
    i, j = torch.meshgrid(sketch.places.double(), torch.arange(p).double(), indexing="ij")
    angle = 2 * torch.pi * i * j / p
    expected = (angle.cos() + angle.sin()) / p**0.5 * sketch.signs * (p / 5) ** 0.5
    v = draw(2, 3, p)
    close(sketch(v), v @ expected.mT)


def test_lengths_are_kept_in_expectation() -> None:
    v = draw(40)
    found = torch.stack([Hartley.drawn(40, 6, seeded(s), CPU)(v).square().sum() for s in range(2_000)])
    assert abs(float(found.mean() - v.square().sum())) < 5 * float(found.std()) / 2_000**0.5


# -- the recursion -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("steps", [1, 4, 7])
def test_lanczos_vectors_span_the_krylov_space(seed: int, steps: int) -> None:
    torch.manual_seed(seed)
    q = torch.linalg.qr(draw(15, 15))[0]
    k, start = (q * torch.linspace(1, 4, 15)) @ q.mT, draw(15)
    found, images = (torch.stack(part) for part in zip(*krylov(lambda v: v @ k, start, steps), strict=True))
    close(images, found @ k)
    powers = [start]
    for _ in range(steps - 1):
        powers.append(powers[-1] @ k)
    expected = torch.linalg.qr(torch.stack(powers).mT)[0]
    close(found.mT @ found, expected @ expected.mT)


def test_an_exhausted_space_ends_the_recursion() -> None:
    torch.manual_seed(0)
    q = torch.linalg.qr(draw(20, 20))[0]
    k = (q[:, :4] * torch.tensor([1.0, 2, 3, 4])) @ q[:, :4].mT
    start = draw(20) @ k
    images = torch.stack([image for _, image in krylov(lambda v: v @ k, start, 20)])
    assert torch.linalg.matrix_rank(images, rtol=1e-8) == 4  # and none of the null space
    close(images @ (q[:, 4:]), torch.zeros(len(images), 16, dtype=torch.float64))
    assert len(list(krylov(lambda v: 3 * v, start, 20))) == 1
    with pytest.raises(lw.errors.InvalidValue, match="longer than zero"):
        next(krylov(lambda v: v @ k, torch.zeros(20), 3))


# -- the score ---------------------------------------------------------------------------------------------------


def problem(kind: str, seed: int = 0) -> tuple[nn.Module, Tensor, Tensor, lw.likelihoods.Likelihood]:
    torch.manual_seed(seed)
    if kind == "sequences":
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
        return net, draw(2, 2, 3), draw(2, 2, 2), lw.likelihoods.Gaussian(0.5)
    if kind == "images":
        net = nn.Sequential(nn.Conv2d(2, 3, (2, 3), stride=(1, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(24, 2)).double()
        return net, draw(4, 2, 5, 6), torch.randint(2, (4, 2)), lw.likelihoods.Bernoulli()
    net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()  # p = 57
    return net, draw(4, 5), torch.randint(3, (4,)), lw.likelihoods.Categorical()


def curvature(likelihood: lw.likelihoods.Likelihood, f: Tensor, J: Tensor) -> Tensor:
    flat, J = f.reshape(-1, f.shape[-1]), J.reshape(-1, f.shape[-1], J.shape[-1])
    if isinstance(likelihood, lw.likelihoods.Categorical):
        p = flat.softmax(-1)
        middle = torch.diag_embed(p) - p[:, :, None] * p[:, None]
    elif isinstance(likelihood, lw.likelihoods.Bernoulli):
        middle = torch.diag_embed(flat.sigmoid() * (1 - flat.sigmoid()))
    else:
        middle = torch.diag_embed(torch.ones_like(flat) / likelihood.noise**2)
    return torch.einsum("map,mab,mbq->pq", J, middle, J)


def left(J: Tensor, v: Tensor) -> Tensor:
    """J (I − VᵀV) Jᵀ with all outputs of an input together."""
    J = J.reshape(len(J), -1, J.shape[-1])
    away = J - J @ v.mT @ v
    return away @ away.mT


@pytest.mark.parametrize("kind", ["classes", "images", "sequences"])
@pytest.mark.parametrize("seed", SEEDS)
def test_with_a_whole_sketch_it_is_the_dense_score(kind: str, seed: int, jacobian) -> None:
    """All directions of G by eigenvectors, in no sketch: V of full rank."""
    model, x, y, likelihood = problem(kind, seed)
    score = lw.scores.sketched_lanczos(model, (x, y), likelihood, rank=40, generator=seeded(seed))
    values, vectors = torch.linalg.eigh(curvature(likelihood, model(x).detach(), jacobian(model, lambda m: m(x))))
    v = vectors[:, values > 1e-9 * values[-1]].mT
    assert bool(((values < 1e-12 * values[-1]) | (values > 1e-5 * values[-1])).all())  # a rank without doubt
    new = draw(*x.shape)
    expected = left(jacobian(model, lambda m: m(new)), v)
    close(score.covariance(new), expected)
    close(score(new), expected.diagonal(dim1=1, dim2=2).sum(-1))
    close(score(new, of="logdet"), torch.linalg.slogdet(expected).logabsdet, 1e-6)
    assert len(score.basis) == len(v)


@pytest.mark.parametrize("rank", [1, 3, 6])
def test_fewer_directions_are_those_of_the_krylov_space(rank: int, jacobian) -> None:
    model, x, y, likelihood = problem("classes")
    score = lw.scores.sketched_lanczos(model, (x, y), likelihood, rank=rank, sketch=1_000, generator=seeded(0))
    g = curvature(likelihood, model(x).detach(), jacobian(model, lambda m: m(x)))
    generator = seeded(0)
    Hartley.drawn(57, 57, generator, CPU)
    powers = [torch.randn(57, generator=generator, dtype=torch.float64) @ g]
    for _ in range(rank - 1):
        powers.append(powers[-1] @ g / g.norm())
    v = torch.linalg.qr(torch.stack(powers).mT)[0].mT
    new = draw(4, 5)
    close(score.covariance(new), left(jacobian(model, lambda m: m(new)), v))
    assert score.passes == rank


@pytest.mark.parametrize(
    ("directions", "size"),
    [(5, 12), pytest.param(5, 40, marks=pytest.mark.full), pytest.param(2, 4, marks=pytest.mark.full)],
)
def test_a_small_sketch_is_right_on_average(directions: int, size: int, jacobian) -> None:
    """The same directions in many sketches. These are not quite uniform over projections, which 3 % allows for."""
    model = problem("classes")[0]
    tangent, new = lw.linearize(model), draw(3, 5)
    v = torch.linalg.qr(draw(57, directions))[0].mT
    expected = left(jacobian(model, lambda m: m(new)), v).diagonal(dim1=1, dim2=2).sum(-1)
    found = []
    for seed in range(400):
        sketch = Hartley.drawn(57, size, seeded(seed), CPU)
        basis = torch.linalg.qr(sketch(v).mT)[0].mT
        found.append(lw.scores.Score(tangent, sketch, basis, 0, 2**30)(new))
    mean, error = torch.stack(found).mean(0), torch.stack(found).std(0) / 20
    assert bool(((mean - expected).abs() < 5 * error + 0.03 * expected).all())
    assert bool((error < 0.06 * expected).all())


def test_training_inputs_have_no_score_and_far_ones_a_high_one() -> None:
    """In any sketch that holds the directions."""
    model, x, _, _ = problem("classes")
    regression = lw.likelihoods.Gaussian(1.0)
    score = lw.scores.sketched_lanczos(model, (x, draw(4, 3)), regression, rank=25, sketch=40)
    near, far = score(x), score(10 * draw(5, 5))
    assert float(near.max()) < 1e-8 * float(far.min())
    assert float(score(x + 0.01).max()) < float(far.min())


def test_float32_networks() -> None:
    model, x, y, likelihood = problem("images")
    new = draw(4, 2, 5, 6)
    exact = lw.scores.sketched_lanczos(model, (x, y), likelihood, rank=20)(new)
    coarse = lw.scores.sketched_lanczos(model.float(), (x.float(), y), likelihood, rank=20)(new.float())
    torch.testing.assert_close(coarse, exact, rtol=0.01, atol=1e-3)


def test_batches_and_memory_change_nothing() -> None:
    model, x, y, likelihood = problem("images")
    loader = DataLoader(TensorDataset(x, y), batch_size=2)
    whole = lw.scores.sketched_lanczos(model, (x, y), likelihood, rank=6, sketch=30)
    cut = lw.scores.sketched_lanczos(model, loader, likelihood, rank=6, sketch=30, memory_budget=2**16)
    close(whole(x), cut(x))


def test_only_sketches_are_kept() -> None:
    model, x, y, likelihood = problem("classes")
    score = lw.scores.sketched_lanczos(model, (x, y), likelihood, rank=7, sketch=20)
    assert score.basis.shape == (7, 20)
    assert score.sketch.signs.dtype == torch.int8
    assert repr(score) == "Score(7 directions of 57 parameters in sketches of 20; 7 passes over the data)"


class Changing:
    """A loader that augments its inputs anew in each pass."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y, self.passes = x, y, 0

    def __iter__(self):
        self.passes += 1
        yield self.x + 0.3 * self.passes, self.y


@pytest.mark.parametrize(
    ("match", "call"),
    [
        ("rank must be at least 1", lambda m, x, y, k: lw.scores.sketched_lanczos(m, (x, y), k, rank=0)),
        ("more than the rank", lambda m, x, y, k: lw.scores.sketched_lanczos(m, (x, y), k, rank=9, sketch=9)),
        ("changes between products", lambda m, x, y, k: lw.scores.sketched_lanczos(m, Changing(x, y), k, rank=5)),
        ("of must be one of", lambda m, x, y, k: lw.scores.sketched_lanczos(m, (x, y), k, rank=3)(x, of="max")),
        ("NaN", lambda m, x, y, k: lw.scores.sketched_lanczos(m, (x, y), k, rank=3)(x / 0 * 0)),
        ("nn.Module", lambda m, x, y, k: lw.scores.sketched_lanczos(lambda x: x, (x, y), k, rank=3)),
        ("from 1 to 5", lambda m, x, y, k: Hartley.drawn(5, 6, seeded(0), CPU)),
    ],
)
def test_what_cannot_be_done_is_said(match: str, call) -> None:
    model, x, y, likelihood = problem("classes")
    with pytest.raises(lw.errors.InvalidValue, match=match):
        call(model, x, y, likelihood)
