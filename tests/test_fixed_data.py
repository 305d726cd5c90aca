"""Data are a fixed set of examples: each once, the same in every pass, in any order; anything else is refused."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, get_worker_info

import lapwing as lw
from lapwing import fixed
from lapwing.curvature import EigenKronecker, accumulate, probe
from lapwing.data import as_batches
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.likelihoods import Gaussian

N = 24
DRAWS: dict[str, Callable[[], float]] = {
    "torch": lambda: float(torch.rand(())),
    "numpy": lambda: float(np.random.rand()),  # noqa: NPY002 - the global state, which augmentations use
    "random": random.random,
}


def inputs(n: int = N) -> Tensor:
    return torch.randn(n, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def targets(n: int = N) -> Tensor:
    x = inputs(n)
    return torch.stack([x.sum(-1), x[:, 0] - x[:, 2]], -1).tanh()


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()


class Augmented(Dataset):
    """Noise on inputs or targets, drawn as `draw` says; none without."""

    def __init__(self, draw: Callable[[], float] | None = None, target: bool = False) -> None:
        self.x, self.y, self.draw, self.target = inputs(), targets(), draw, target

    def __len__(self) -> int:
        return N

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        noise = 0.1 * self.draw() if self.draw else 0.0
        return (self.x[i], self.y[i] + noise) if self.target else (self.x[i] + noise, self.y[i])


class Stream(IterableDataset):
    """A stream that may shuffle, add noise, and share itself out among workers."""

    def __init__(
        self, sharded: bool = False, draw: Any = None, shuffled: bool = False, x: Tensor | None = None
    ) -> None:
        self.x = inputs() if x is None else x
        self.y, self.sharded, self.draw, self.shuffled = targets(), sharded, draw, shuffled

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        info, order = get_worker_info(), list(range(len(self.x)))
        if self.sharded and info is not None:
            order = order[info.id :: info.num_workers]
        if self.shuffled:
            order = [order[i] for i in torch.randperm(len(order)).tolist()]
        for i in order:
            yield self.x[i] + (0.1 * self.draw() if self.draw else 0.0), self.y[i % N]


class Again:
    """Batches from a generator function, in as many passes as one likes."""

    def __init__(self, make: Callable[[], Iterator[Any]]) -> None:
        self.make = make

    def __iter__(self) -> Iterator[Any]:
        return self.make()


def noisy_batches(draw: Callable[[], float]) -> Iterator[Any]:
    for i in range(0, N, 8):
        yield inputs()[i : i + 8] + 0.1 * draw(), targets()[i : i + 8]


def shuffled_batches() -> Iterator[Any]:
    for index in torch.randperm(N).split(7):
        yield inputs()[index], targets()[index]


AUGMENTED: dict[str, Callable[[Any], Any]] = {
    "dataset": Augmented,
    "targets": lambda draw: Augmented(draw, target=True),
    "loader": lambda draw: DataLoader(Augmented(draw), batch_size=8),
    "shuffled loader": lambda draw: DataLoader(Augmented(draw), batch_size=8, shuffle=True),
    "in collate": lambda draw: DataLoader(
        TensorDataset(inputs(), targets()),
        batch_size=8,
        collate_fn=lambda b: (torch.stack([x for x, _ in b]) + draw(), torch.stack([y for _, y in b])),
    ),
    "stream": lambda draw: DataLoader(Stream(draw=draw), batch_size=8),
    "re-iterable": lambda draw: Again(lambda: noisy_batches(draw)),
}


def refused() -> Any:
    return pytest.raises(InvalidValue, match=r"(two reads of the same examples|two passes over the data).*augmentation")


# -- random augmentation -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("kind", AUGMENTED)
def test_random_augmentation_is_refused(kind: str, draw: str) -> None:
    with refused():
        lw.laplace(net(), AUGMENTED[kind](DRAWS[draw]), "gaussian")


@pytest.mark.parametrize("structure", ["full", "kron", "ekfac", "block", "diag", "lowrank", "matrix_free"])
@pytest.mark.parametrize("kind", ["loader", "stream"])
def test_no_structure_takes_it(kind: str, structure: str) -> None:
    with refused():
        lw.laplace(net(), AUGMENTED[kind](DRAWS["torch"]), "gaussian", structure=structure)


@pytest.mark.parametrize("draw", DRAWS)
@pytest.mark.parametrize("persistent", [False, True])
def test_workers_draw_from_seeds_of_their_own(draw: str, persistent: bool) -> None:
    loader = DataLoader(Augmented(DRAWS[draw]), batch_size=8, num_workers=1, persistent_workers=persistent)
    with refused():
        lw.laplace(net(), loader, "gaussian")


def test_items_that_are_batches_are_read_twice() -> None:
    class Batches(Augmented):
        def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
            x, y = super().__getitem__(i)
            return x.unsqueeze(0), y.unsqueeze(0)

    lw.laplace(net(), DataLoader(Batches(), batch_size=None), "gaussian")
    with refused():
        lw.laplace(net(), DataLoader(Batches(DRAWS["torch"]), batch_size=None), "gaussian")


def test_a_dataset_with_a_generator_of_its_own_is_refused_too() -> None:
    own = np.random.default_rng(0)
    with refused():
        lw.laplace(net(), Augmented(own.random), "gaussian")


SHUFFLED: dict[str, Callable[[], Any]] = {
    "loader": lambda: DataLoader(Augmented(), batch_size=7, shuffle=True),
    "own generator": lambda: DataLoader(Augmented(), batch_size=7, shuffle=True, generator=torch.Generator()),
    "worker": lambda: DataLoader(Augmented(), batch_size=7, shuffle=True, num_workers=1),
    "stream": lambda: DataLoader(Stream(shuffled=True), batch_size=7),
    "stream of one worker": lambda: DataLoader(Stream(shuffled=True), batch_size=7, num_workers=1),
    "re-iterable": lambda: Again(shuffled_batches),
}


SLOW = ("worker", "stream of one worker")  # another process a pass


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k in SLOW else k for k in SHUFFLED])
def test_shuffling_is_never_refused(kind: str) -> None:
    data = SHUFFLED[kind]()
    la = lw.laplace(net(), data, "gaussian", structure="ekfac")
    assert la.state.n == N
    torch.manual_seed(5)  # another order than in the fit
    la.certify(8)
    la.recentered()
    la.tuned()


def test_shuffling_in_a_worker_is_not_refused() -> None:
    la = lw.laplace(net(), SHUFFLED["stream of one worker"](), "gaussian", structure="kron")
    torch.manual_seed(5)
    assert la.recentered().state.n == N


def test_batches_that_round_otherwise_are_the_same_inputs() -> None:
    """A transform of a whole batch may give another last bit at another place."""

    def batches() -> Iterator[Any]:
        for index in torch.randperm(N).split(7):
            yield inputs()[index].float() * (1 + 1e-7 * torch.rand(len(index), 3)), targets()[index].float()

    assert lw.laplace(net().float(), Again(batches), "gaussian").state.n == N


def test_rows_padded_to_their_batch_are_not_compared() -> None:
    def batches() -> Iterator[Any]:
        for index in torch.randperm(N).split(7):
            width = 3 + int(index.max()) % 5  # padded with ones
            yield torch.cat([inputs()[index], inputs().new_ones(len(index), width - 3)], 1), targets()[index]

    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net()

        def forward(self, x: Tensor) -> Tensor:
            return self.net(x[:, :3])

    assert lw.laplace(First(), Again(batches), "gaussian", structure="full").state.n == N


def test_the_random_state_is_left_as_it_was() -> None:
    model, loader = (
        net(),
        DataLoader(Augmented(DRAWS["numpy"]), batch_size=8, shuffle=True, generator=torch.Generator()),
    )

    def states() -> list[Any]:
        numpy = np.random.get_state()[1].tolist()  # noqa: NPY002
        return [torch.get_rng_state().tolist(), numpy, random.getstate(), loader.generator.get_state().tolist()]

    before = states()
    with refused():
        lw.laplace(model, loader, "gaussian")
    assert states() == before


def test_the_second_pass_of_ekfac_is_held_to_the_first() -> None:
    """Given what a probe saw, the passes alone must notice: here inputs move with each pass."""
    moves = iter(range(100))
    data = Again(lambda: iter([(inputs() + 0.1 * next(moves), targets())]))
    tangent = lw.linearize(net())
    seen = probe(tangent, as_batches((inputs(), targets())))
    with refused():
        accumulate(EigenKronecker(), tangent, Gaussian(), data, seen=seen)


@pytest.mark.parametrize("structure", ["kron", "ekfac", "full"])
def test_other_inputs_than_the_fits_are_noticed_afterwards(structure: str) -> None:
    la = lw.laplace(net(), (inputs(), targets()), "gaussian", structure=structure)
    moved = (inputs() + 1e-3 * torch.sin(torch.arange(3.0 * N).reshape(N, 3)), targets())
    for read in (lambda: la.certify(8, data=moved), lambda: la.recentered(moved), lambda: la.tuned(data=moved)):
        with pytest.raises(InvalidValue, match=r"not the data of the fit|two passes over the data"):
            read()
    order = torch.randperm(N)
    same = [(inputs()[i], targets()[i]) for i in order.split(5)]
    la.certify(8, data=same)
    la.recentered(same)


def test_sums_of_inputs_add_and_are_saved(tmp_path: Any) -> None:
    x, y = inputs(), targets()
    parts = [lw.laplace(net(), (x[i], y[i]), "gaussian", structure="kron") for i in (slice(0, 9), slice(9, N))]
    whole = lw.laplace(net(), (x, y), "gaussian", structure="kron")
    torch.testing.assert_close((parts[0].state + parts[1].state).inputs, whole.state.inputs)
    torch.testing.assert_close(whole.without((x[9:], y[9:])).state.inputs, parts[0].state.inputs)
    whole.save(tmp_path / "la")
    loaded = lw.load(tmp_path / "la", net())
    assert torch.equal(loaded.state.inputs, whole.state.inputs)
    with refused():
        loaded.certify(8, data=(x + 0.01, y))


def test_inputs_that_are_no_rows_are_not_compared() -> None:
    graph = {"nodes": torch.randn(5, 2), "edges": torch.zeros(2, 9)}
    sums = fixed.input_sums(graph, 4)
    assert sums[1].isnan()
    fixed.check_inputs(sums, fixed.input_sums(graph, 5))
    assert fixed.input_sums(torch.eye(3).to_sparse(), 3)[1].isnan()
    a, b = (fixed.input_sums({"x": torch.arange(6).reshape(3, 2), "flag": "kept"}, 3) for _ in range(2))
    assert fixed.same_inputs(a, b)
    assert not fixed.same_inputs(a, fixed.input_sums({"x": torch.arange(6).reshape(3, 2).flip(1), "flag": "kept"}, 3))


# -- streams -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffled", [False, True])
@pytest.mark.parametrize("options", [{"batch_size": 5}, {"batch_size": 5, "persistent_workers": True}])
def test_a_stream_that_each_worker_reads_whole_is_refused(options: dict[str, Any], shuffled: bool) -> None:
    loader = DataLoader(Stream(shuffled=shuffled), num_workers=2, **options)
    with pytest.raises(
        InvalidValue, match=r"each of the 2 worker.*one gives 24 examples and 2 give 48.*get_worker_info"
    ):
        lw.laplace(net(), loader, "gaussian")


def test_streams_of_whole_batches_are_seen_through() -> None:
    class Batches(Stream):
        def __iter__(self) -> Iterator[Any]:
            for x, y in super().__iter__():
                yield x.unsqueeze(0), y.unsqueeze(0)

    with pytest.raises(InvalidValue, match="one gives 24 examples and 2 give 48"):
        lw.laplace(net(), DataLoader(Batches(), batch_size=None, num_workers=2), "gaussian")
    loader = DataLoader(Batches(sharded=True), batch_size=None, num_workers=2)
    assert lw.laplace(net(), loader, "gaussian").state.n == N


def test_a_stream_that_is_shared_out_counts_once() -> None:
    loader = DataLoader(Stream(sharded=True), batch_size=5, num_workers=2)
    la = lw.laplace(net(), loader, "gaussian", structure="kron")
    plain = lw.laplace(net(), (inputs(), targets()), "gaussian", structure="kron")
    assert la.state.n == N
    torch.testing.assert_close(la.state.sums, plain.state.sums)


def test_data_that_hold_every_example_twice_are_no_stream_read_twice() -> None:
    loader = DataLoader(Stream(sharded=True, x=torch.cat([inputs(), inputs()])), batch_size=N, num_workers=2)
    assert lw.laplace(net(), loader, "gaussian").state.n == 2 * N


def test_dropping_the_end_of_a_stream_is_said() -> None:
    with pytest.warns(LapwingWarning, match=r"drop_last=True.*stream, up to 6, which are not counted.*drop_last=False"):
        as_batches(DataLoader(Stream(), batch_size=7, drop_last=True))
    with pytest.warns(LapwingWarning, match="each of its 2 workers"):
        as_batches(DataLoader(Stream(), batch_size=7, drop_last=True, num_workers=2))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_batches(DataLoader(Stream(), batch_size=7))
