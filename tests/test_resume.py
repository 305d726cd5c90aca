"""A fit that was stopped at any batch goes on to the same state, bit by bit, or refuses and says why.

Run as a script it makes fits in forked processes that are killed (SIGKILL) at random batches and while they write.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import lapwing as lw
from lapwing import files
from lapwing.curvature import checkpoint

BATCHES, EVERY = 12, 3
STRUCTURES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "ekfac": "ekfac",
    "diag": "diag",
    "block": "block",
    "lowrank": lw.curvature.LowRank(7),
    "lowrank, 3 passes": lw.curvature.LowRank(7, 3),
    "matrix_free": lw.curvature.MatrixFree(samples=4),
}
PASSES = {"ekfac": 2, "lowrank, 3 passes": 3}
CASES = [(s, f) for s in STRUCTURES for f in ("exact", "monte_carlo") if (s, f) != ("matrix_free", "monte_carlo")]


class Stopped(Exception):
    pass


class Batches:
    """The batches of (x, y) in pairs of examples; `stop` is called before the batch number `at`, over all passes."""

    def __init__(self, x: Tensor, y: Tensor, at: int = -1, stop: Callable[[], None] | None = None) -> None:
        self.x, self.y, self.at, self.stop, self.count = x, y, at, stop, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for start in range(0, len(self.x), 2):
            if self.count == self.at and self.stop is not None:
                self.stop()
            self.count += 1
            yield self.x[start : start + 2], self.y[start : start + 2]


BEFORE = 2 + BATCHES  # batches that are read before the pass: two looks at the first, and the counting


def stopped() -> None:
    raise Stopped


def problem(seed: int = 0) -> tuple[nn.Module, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    x = torch.randn(2 * BATCHES - 1, 3, generator=generator, dtype=torch.float64)
    return net, x, torch.randint(2, (len(x),), generator=generator)


def assert_same(a: lw.curvature.State, b: lw.curvature.State) -> None:
    """Bit by bit."""
    assert (a.n, a.targets, a.structure, a.factor) == (b.n, b.targets, b.structure, b.factor)
    for part in ("sums", "statistics", "basis"):
        mine, theirs = getattr(a, part), getattr(b, part)
        assert mine.keys() == theirs.keys()
        for key, value in mine.items():
            assert value.dtype == theirs[key].dtype
            assert torch.equal(value, theirs[key]), (part, key)
    for (x, u), (x2, u2) in zip(a.batches, b.batches, strict=True):
        assert torch.equal(u, u2)
        assert all(torch.equal(p, q) for p, q in zip(lw.tree.tensors(x), lw.tree.tensors(x2), strict=True))


def interrupted(path: Path, *args: Any, at: int, **options: Any) -> None:
    """A fit that is stopped before batch `at` of its passes."""
    model, x, y, likelihood = args
    with pytest.raises(Stopped):
        lw.laplace(model, Batches(x, y, BEFORE + at, stopped), likelihood, checkpoint=path, every=EVERY, **options)
    assert path.exists() == (at >= EVERY)


# -- the same bits ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("structure", "factor"), CASES)
def test_a_resumed_fit_is_the_uninterrupted_one_bit_by_bit(structure: str, factor: str, tmp_path: Path) -> None:
    model, x, y = problem()
    options = {"structure": STRUCTURES[structure], "factor": factor}
    plain = lw.laplace(model, Batches(x, y), "categorical", **options).state
    path = tmp_path / "fit.checkpoint"
    for at in range(1, PASSES.get(structure, 1) * BATCHES, 7):
        interrupted(path, model, x, y, "categorical", at=at, **options)
        again = lw.laplace(model, Batches(x, y), "categorical", checkpoint=path, every=EVERY, **options)
        assert_same(again.state, plain)
        assert os.listdir(tmp_path) == []  # it is removed in the end


@pytest.mark.parametrize("case", ["last layer", "masks", "small memory", "noise per output", "hessian", "empirical"])
def test_every_way_to_fit_resumes(case: str, tmp_path: Path) -> None:
    model, x, _ = problem(1)
    y = torch.randn(len(x), 2, dtype=torch.float64)
    likelihood: Any = lw.likelihoods.Gaussian(0.3)
    mask = {"0.weight": torch.rand(4, 3) < 0.7, "2.bias": torch.tensor([False, True])}
    options: dict[str, Any] = {
        "last layer": {"subset": "last_layer", "structure": lw.curvature.Full("primal")},
        "masks": {"subset": mask, "structure": "kron"},
        "small memory": {"memory_budget": 2**16, "structure": lw.curvature.Full("primal", 2**16)},
        "noise per output": {"structure": "ekfac"},
        "hessian": {"factor": "hessian"},
        "empirical": {"factor": "empirical", "structure": "block"},
    }[case]
    if case == "noise per output":
        likelihood = lw.likelihoods.Gaussian(torch.tensor([0.3, 0.7]))
    path = tmp_path / "file"
    interrupted(path, model, x, y, likelihood, at=8, **options)
    again = lw.laplace(model, Batches(x, y), likelihood, checkpoint=path, every=EVERY, **options)
    assert_same(again.state, lw.laplace(model, Batches(x, y), likelihood, **options).state)


def test_networks_with_convolutions_and_inputs_in_dicts_resume(cnn: nn.Module, tmp_path: Path) -> None:
    x, y = torch.randn(9, 2, 5, 6, dtype=torch.float64), torch.randn(9, 2, dtype=torch.float64)
    batches = [({"image": x[i : i + 2], "name": f"{i}"}, y[i : i + 2]) for i in range(0, 9, 2)]
    path = tmp_path / "file"
    for structure in ("kron", "ekfac", lw.curvature.Full("primal"), lw.curvature.Full("dual")):
        options = {"structure": structure, "forward": lambda model, batch: model(batch["image"])}
        bad = [*batches[:4], ({"image": batches[4][0]["image"] * torch.nan, "name": "8"}, batches[4][1])]
        with pytest.raises(lw.errors.InvalidValue, match="NaN"):
            lw.laplace(cnn, bad, "gaussian", checkpoint=path, every=1, **options)
        again = lw.laplace(cnn, batches, "gaussian", checkpoint=path, every=1, **options)  # that batch was not seen yet
        assert_same(again.state, lw.laplace(cnn, batches, "gaussian", **options).state)


def test_a_large_batch_that_is_cut_is_one_batch(tmp_path: Path) -> None:
    """Checkpoints are between batches, though a batch is worked on in pieces."""
    model, x, y = problem()
    x, y = x.repeat(60, 1), y.repeat(60)  # 1,380 examples; pieces of at most 1,024
    options = {"structure": lw.curvature.Diagonal(2**16), "memory_budget": 2**16}
    batches = [(x, y), (2 * x, y), (3 * x, y)]
    path = tmp_path / "file"
    with pytest.raises(lw.errors.InvalidValue, match="NaN"):
        lw.laplace(model, [*batches[:2], (x * torch.nan, y)], "categorical", checkpoint=path, every=1, **options)
    again = lw.laplace(model, batches, "categorical", checkpoint=path, every=1, **options)
    assert_same(again.state, lw.laplace(model, batches, "categorical", **options).state)


def test_a_resume_runs_the_network_on_what_is_left_only(tmp_path: Path) -> None:
    model, x, y = problem()
    path, runs = tmp_path / "file", [0]
    interrupted(path, model, x, y, "categorical", at=10, structure="kron")
    model.register_forward_hook(lambda *_: runs.__setitem__(0, runs[0] + 1))
    lw.laplace(model, Batches(x, y), "categorical", structure="kron")
    whole, runs[0] = runs[0], 0
    lw.laplace(model, Batches(x, y), "categorical", structure="kron", checkpoint=path, every=EVERY)
    assert whole - runs[0] == 9 - 1  # nine batches were in the file; one run more looks at the network's outputs


def test_the_users_generator_ends_as_without_an_interruption(tmp_path: Path) -> None:
    model, x, y = problem()
    path, states = tmp_path / "file", []
    options: dict[str, Any] = {"structure": "ekfac", "factor": "monte_carlo"}
    for resume in (False, True):
        if resume:
            own = torch.Generator().manual_seed(5)
            interrupted(path, model, x, y, "categorical", at=BATCHES + 7, generator=own, **options)
        own = torch.Generator().manual_seed(5)
        kept = {"checkpoint": path, "every": EVERY} if resume else {}
        lw.laplace(model, Batches(x, y), "categorical", generator=own, **options, **kept)
        states.append(own.get_state())
    assert torch.equal(*states)


def test_a_loader_that_shuffles_resumes_from_the_same_seed_and_from_no_other(tmp_path: Path) -> None:
    model, x, y = problem()
    data = TensorDataset(x, y)

    def fit(seed: int, at: int = -1, **options: Any) -> lw.Laplace:
        torch.manual_seed(seed)
        return lw.laplace(
            model, DataLoader(data, batch_size=2, shuffle=True), "categorical", structure="kron", **options
        )

    path, plain, write = tmp_path / "file", fit(3), files.write
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "write", lambda *args: (write(*args), stopped()))
        with pytest.raises(Stopped):
            fit(3, checkpoint=path, every=EVERY)
    before = path.read_bytes()
    with pytest.raises(lw.errors.InvalidValue, match="first of the data differs"):
        fit(4, checkpoint=path, every=EVERY)
    assert path.read_bytes() == before
    assert_same(fit(3, checkpoint=path, every=EVERY).state, plain.state)


def test_progress_tells_where_it_resumed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, x, y = problem()
    path = tmp_path / "file"
    interrupted(path, model, x, y, "categorical", at=7, structure="kron")
    lw.laplace(model, Batches(x, y), "categorical", structure="kron", checkpoint=path, every=EVERY, progress=True)
    assert "kron, resumed at batch 6" in capsys.readouterr().err


def test_a_checkpoint_takes_the_bytes_that_are_said(tmp_path: Path) -> None:
    """docs/guide/continual.md, in float64: factors of 8 bytes, not 4."""
    model, x, y = problem()
    path, p, sides = tmp_path / "file", 26, 4**2 + 4**2 + 5**2 + 2**2
    for structure, at, expected in [
        ("kron", 8, 8 * sides + 2 * 8),  # and two counts
        ("ekfac", 20, 8 * p + 8 * sides),
        ("diag", 8, 8 * p),
        ("block", 8, 8 * (16**2 + 10**2)),
        ("dual", 8, 6 * (2 * 3 * 8 + 2 * 2 * 8)),  # six batches of two, one column each
        ("primal", 8, 8 * p**2 + 6 * 2 * 8 * p),  # and their rows, which wait to be multiplied
        ("lowrank", 8, 8 * 7 * p + 4 * 8),
        ("lowrank, 3 passes", 32, 2 * 8 * 7 * p + 4 * 8),
    ]:
        interrupted(path, model, x, y, "categorical", at=at, structure=STRUCTURES[structure], factor="exact")
        tensors, _ = files.read(path, checkpoint.SCHEMA, files.CHECKPOINT)
        sums = {k: v for k, v in tensors.items() if k.startswith(("run.accumulator", "basis."))}
        assert sum(v.numel() * v.element_size() for v in sums.values()) == expected, structure
        path.unlink()


# -- another fit is refused ------------------------------------------------------------------------------------------


def moved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        model[2].bias[1] += 1e-12
    return model


def other_code(model: nn.Module) -> nn.Module:
    model[1] = nn.ReLU()
    return model


REFUSED: dict[str, tuple[Callable[..., dict[str, Any]], str]] = {
    "weights": (lambda m, x, y: {"model": moved(m)}, r"value of 2\.bias differs"),
    "code": (lambda m, x, y: {"model": other_code(m)}, "other outputs"),
    "structure": (lambda m, x, y: {"structure": "diag"}, r"structure is Kronecker.*not Diagonal"),
    "sharing": (lambda m, x, y: {"structure": lw.curvature.Kronecker(sharing="reduce")}, "structure is"),
    "memory": (lambda m, x, y: {"memory_budget": 2**20}, "structure is"),
    "factor": (lambda m, x, y: {"factor": "empirical"}, "output factor differs"),
    "samples": (lambda m, x, y: {"factor": lw.curvature.Factor("monte_carlo", 3)}, "output factor differs"),
    "likelihood": (lambda m, x, y: {"likelihood": "bernoulli"}, "likelihood differs"),
    "noise": (lambda m, x, y: {"likelihood": lw.likelihoods.Gaussian(0.5)}, r"likelihood differs.*0\.5"),
    "subset": (lambda m, x, y: {"subset": "last_layer"}, "set of parameters differs"),
    "mask": (lambda m, x, y: {"subset": torch.arange(26) > 0}, "masks of parameters differs"),
    "generator": (lambda m, x, y: {"generator": torch.Generator().manual_seed(1)}, "state of the generator"),
    "hook": (lambda m, x, y: {"forward": lambda model, x: model(x)}, "forward= hook differs"),
    "fewer data": (lambda m, x, y: {"data": Batches(x[:-1], y[:-1])}, "number of examples differs.*23.*22"),
    "an input": (lambda m, x, y: {"data": Batches(x + 1e-12 * (torch.arange(23) == 9).unsqueeze(1), y)}, "batch 5 now"),
    "a target": (lambda m, x, y: {"data": Batches(x, y + 1e-12 * (torch.arange(23) == 9).unsqueeze(1))}, "batch 5 now"),
    "an order": (lambda m, x, y: {"data": Batches(x[SWAPPED], y[SWAPPED])}, "batch 3 now"),
    "batch size": (lambda m, x, y: {"data": (x, y)}, r"batch 1 now holds 23 examples, not the 2 of then"),
    "dtype": (lambda m, x, y: {"data": Batches(x, y.float())}, "batch 1 now"),
}  # fmt: skip
SWAPPED = [*range(4), 9, *range(5, 9), 4, *range(10, 23)]


@pytest.mark.parametrize("case", REFUSED)
def test_the_checkpoint_of_another_fit_is_refused_and_stays(case: str, tmp_path: Path) -> None:
    model, x, _ = problem()
    y = torch.sigmoid(x[:, :2]).round()  # that every likelihood takes
    usual = {"likelihood": "gaussian", "structure": "kron", "factor": "exact"}
    path = tmp_path / "file"
    with pytest.raises(Stopped):
        lw.laplace(model, Batches(x, y, BEFORE + 8, stopped), **usual, checkpoint=path, every=EVERY)
    before, twin = path.read_bytes(), problem()[0]
    change, says = REFUSED[case]
    call = {"model": model, "data": Batches(x, y), **usual, **change(twin, x, y)}
    with pytest.raises(lw.errors.InvalidValue, match=says) as caught:
        lw.laplace(**call, checkpoint=path, every=EVERY)
    assert "delete it to begin anew" in str(caught.value)
    assert path.read_bytes() == before
    assert_same(
        lw.laplace(model, Batches(x, y), **usual, checkpoint=path, every=EVERY).state,
        lw.laplace(model, Batches(x, y), **usual).state,
    )


def test_another_version_of_torch_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    interrupted(tmp_path / "file", model, x, y, "categorical", at=8, structure="kron")
    monkeypatch.setattr(torch, "__version__", "2.99.0")
    with pytest.raises(lw.errors.InvalidValue, match=r"version of torch differs.*2\.99\.0"):
        lw.laplace(model, Batches(x, y), "categorical", structure="kron", checkpoint=tmp_path / "file")


def test_another_machine_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, x, y = problem()
    interrupted(tmp_path / "file", model, x, y, "categorical", at=8, structure="kron")
    monkeypatch.setattr(checkpoint, "machine", lambda: "64 threads on AVX512")
    with pytest.warns(lw.errors.LapwingWarning, match="64 threads.*not to the last bit"):
        lw.laplace(model, Batches(x, y), "categorical", structure="kron", checkpoint=tmp_path / "file")


def test_the_basis_given_belongs_to_the_fit(tmp_path: Path) -> None:
    model, x, y = problem()
    tangent, likelihood = lw.linearize(model, "all"), lw.likelihoods.Categorical()
    a, b = (
        lw.accumulate(lw.curvature.Kronecker(), tangent, likelihood, (x[i], y[i])) for i in (slice(9), slice(9, 23))
    )
    path = tmp_path / "file"

    def fit(data: Any, basis: Any, **kept: Any) -> lw.curvature.State:
        return lw.accumulate(lw.curvature.EigenKronecker(), tangent, likelihood, data, basis=basis, **kept)

    with pytest.raises(Stopped):
        fit(Batches(x, y, 1 + BATCHES + 7, stopped), a, checkpoint=path, every=EVERY)
    with pytest.raises(lw.errors.InvalidValue, match="basis given differs"):
        fit(Batches(x, y), b, checkpoint=path, every=EVERY)
    assert_same(fit(Batches(x, y), a, checkpoint=path, every=EVERY), fit(Batches(x, y), a))


# -- files -----------------------------------------------------------------------------------------------------------


def rewritten(path: Path, **changed: Any) -> bytes:
    """The file with other entries in its header, and the digest of that."""
    tensors, header = files.read(path, checkpoint.SCHEMA, files.CHECKPOINT)
    files.write(path.with_name("rewritten"), tensors, {**header, **changed}, files.CHECKPOINT)
    return path.with_name("rewritten").read_bytes()


def test_what_is_no_checkpoint_is_an_error_and_stays(tmp_path: Path) -> None:
    model, x, y = problem()
    la = lw.laplace(model, (x, y), "categorical", structure="kron")
    whole, path = tmp_path / "whole", tmp_path / "file"
    interrupted(whole, model, x, y, "categorical", at=8, structure="kron")
    data = whole.read_bytes()
    la.save(tmp_path / "saved")
    for content, says in [
        (data[: len(data) // 2], "not a whole safetensors file"),
        (data[:-1], "not a whole safetensors file"),
        (b"", "not a whole safetensors file"),
        (b"weights" * 99, "not a whole safetensors file"),
        ((tmp_path / "saved").read_bytes(), "a saved fit: read it with lw.load"),
        (data.replace(b'\\"schema\\": 2', b'\\"schema\\": 9'), "do not match its digest"),
        (rewritten(whole, schema=9), "schema 9"),
    ]:
        path.write_bytes(content)
        with pytest.raises(lw.errors.InvalidValue, match=says):
            lw.laplace(model, Batches(x, y), "categorical", structure="kron", checkpoint=path)
        assert path.read_bytes() == content
    with pytest.raises(lw.errors.InvalidValue, match="a checkpoint: give it to"):
        lw.load(whole, model)


def test_what_killed_writers_left_goes_and_nothing_else(tmp_path: Path) -> None:
    model, x, y = problem()
    left = [f".file.{'0a' * 16}.tmp", f".file.{'f' * 32}.tmp"]
    others = [".file.tmp", f".file.{'0' * 31}.tmp", f".file.rank0.{'0' * 32}.tmp", f"file.{'0' * 32}.tmp", ".file."]
    for name in (*left, *others):
        (tmp_path / name).touch()
    lw.laplace(model, (x, y), "categorical", structure="kron", checkpoint=tmp_path / "file")
    assert sorted(os.listdir(tmp_path)) == sorted(others)


def test_arguments_are_checked_before_the_first_pass(tmp_path: Path) -> None:
    model, x, y = problem()
    for options, says in [
        ({"checkpoint": tmp_path / "no" / "file"}, "folder .* does not exist"),
        ({"checkpoint": tmp_path}, "it is a folder"),
        ({"checkpoint": tmp_path / "file", "every": 0}, "every is a number of batches"),
        ({"checkpoint": tmp_path / "file", "every": 2.5}, "every is a number of batches"),
        ({"every": 5}, "give checkpoint="),
    ]:
        with pytest.raises(lw.errors.InvalidValue, match=says):
            lw.laplace(model, Batches(x, y, BEFORE, stopped), "categorical", structure="kron", **options)


def test_a_structure_that_does_not_name_what_changes_has_no_checkpoints(tmp_path: Path) -> None:
    class Plain:
        def __init__(self, tangent: Any) -> None:
            self.forward = tangent

        def observe(self, *args: Any) -> None:
            pass

        def finish(self) -> tuple[dict[str, Tensor], tuple]:
            return {}, ()

    class Own(lw.curvature.Diagonal):
        def start(self, tangent: Any, *args: Any) -> Any:
            return Plain(tangent)

    model, x, y = problem()
    with pytest.raises(lw.errors.InvalidValue, match="Plain does not name its `mutable`"):
        lw.accumulate(Own(), lw.linearize(model), lw.likelihoods.Categorical(), (x, y), checkpoint=tmp_path / "file")


# -- killed ----------------------------------------------------------------------------------------------------------


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def kill_while_writing(rng: random.Random, writes: int) -> None:
    """At the write of that number: with half of the file there, or with all of it but its name."""
    put, half, count = files._put, rng.random() < 0.5, [0]

    def dying(file: Any, *content: Any) -> None:
        count[0] += 1
        put(file, *content)
        if count[0] == writes:
            file.flush()
            if half:
                file.truncate(file.seek(0, os.SEEK_END) // 2)
            kill()

    files._put = dying


def fit_and_save(out: Path, path: Path | None, structure: str, factor: str, at: int = -1) -> None:
    model, x, y = problem()
    kept: dict[str, Any] = {} if path is None else {"checkpoint": path, "every": EVERY}
    data = Batches(x, y, at, kill)
    lw.laplace(model, data, "categorical", structure=STRUCTURES[structure], factor=factor, **kept).save(out)


def forked(run: Callable[[], None]) -> int:
    """Run in a process of its own; the signal that ended it, or 0."""
    child = os.fork()
    if child == 0:
        try:
            run()
            os._exit(0)
        except BaseException as error:
            print(f"{type(error).__name__}: {error}", flush=True)
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "the child failed"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def trial(folder: Path, number: int) -> None:
    """Two kills, one at a random batch and one while a checkpoint is written; then to the end."""
    rng = random.Random(number)
    structure, factor = CASES[number % len(CASES)]
    path, batches = folder / "fit.checkpoint", PASSES.get(structure, 1) * BATCHES
    plain, resumed = folder / "plain", folder / "resumed"
    at = rng.randrange(1, batches)
    assert forked(lambda: fit_and_save(resumed, path, structure, factor, BEFORE + at)) == signal.SIGKILL
    assert path.exists() == (at >= EVERY)

    def writing() -> None:
        kill_while_writing(rng, 1)
        fit_and_save(resumed, path, structure, factor)

    before = path.read_bytes() if path.exists() else None
    assert forked(writing) == signal.SIGKILL
    assert before == (path.read_bytes() if path.exists() else None)  # the last whole one
    assert forked(lambda: fit_and_save(resumed, path, structure, factor)) == 0
    assert forked(lambda: fit_and_save(plain, None, structure, factor)) == 0
    assert resumed.read_bytes() == plain.read_bytes()
    assert sorted(p.name for p in folder.iterdir()) == ["plain", "resumed"]  # nothing is left of the killed
    print(f"{structure}, {factor}: killed at batch {at} of {batches} and while writing; the same bits")


# -- on several ranks ------------------------------------------------------------------------------------------------


SHARDS = slice(0, 19), slice(19, 23)  # the second has two batches, and never comes to write a checkpoint


def on_ranks(store: Path, run: Callable[[int], None]) -> list[int]:
    """Run on two ranks, each forked; how they ended."""
    children = []
    for rank in (0, 1):
        children.append(os.fork())
        if children[-1] == 0:
            try:
                limit = timedelta(seconds=60)
                dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2, timeout=limit)
                run(rank)
                dist.destroy_process_group()
                os._exit(0)
            except BaseException as error:
                os.write(2, f"rank {rank}: {type(error).__name__}: {error}\n".encode())  # a line of its own
                os._exit(1)
    return [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]


def trial_on_ranks(folder: Path, structure: str, at: int) -> None:
    """Rank 0 is killed, and with it the group; its file truncated is an error on both; whole, both go on from what each
    has."""
    model, x, y = problem()

    def fit(rank: int, out: str, at: int = -1, **kept: Any) -> None:
        data = Batches(x[SHARDS[rank]], y[SHARDS[rank]], at if rank == 0 else -1, kill)
        options = {"structure": STRUCTURES[structure], "factor": "monte_carlo", "process_group": "world", **kept}
        lw.laplace(model, data, "categorical", **options).save(folder / f"{out}{rank}")

    kept: dict[str, Any] = {"checkpoint": folder / "fit.checkpoint", "every": EVERY}
    killed = on_ranks(folder / "store0", lambda rank: fit(rank, "no", at, **kept))
    assert killed == [-signal.SIGKILL, 1], killed
    left = sorted(p.name for p in folder.iterdir() if "store" not in p.name)
    assert left == [".fit.checkpoint.rank0.lock", "fit.checkpoint.rank0"]  # nobody holds it
    path = folder / "fit.checkpoint.rank0"
    whole = path.read_bytes()
    path.write_bytes(whole[:-9])
    assert on_ranks(folder / "store3", lambda rank: fit(rank, "no", **kept)) == [1, 1]
    path.write_bytes(whole)
    assert on_ranks(folder / "store1", lambda rank: fit(rank, "resumed", **kept)) == [0, 0]
    assert on_ranks(folder / "store2", lambda rank: fit(rank, "plain")) == [0, 0]
    for rank in (0, 1):
        assert (folder / f"resumed{rank}").read_bytes() == (folder / f"plain{rank}").read_bytes()
    assert not list(folder.glob("*checkpoint*"))
    print(f"{structure} on two ranks: killed at batch {at}; the same bits")


# -- as processes ----------------------------------------------------------------------------------------------------


TRIALS = len(CASES)  # one of each; `make soak` makes 200 kills
RANKS = [("kron", 2 + 10 + 7), ("ekfac", 2 + 10 + 4), ("ekfac", 2 + 10 + 10 + 8)]  # in the first pass and in the second


@pytest.mark.full
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_killed_fits_resume_to_the_same_bits(tmp_path: Path) -> None:
    """At random batches and while they write; alone, and on two ranks."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("the same bits") == TRIALS + len(RANKS)
    for rank in (0, 1):
        told = [line for line in done.stderr.splitlines() if line.startswith(f"rank {rank}: ")]
        assert sum("not a whole safetensors file" in line for line in told) == len(RANKS)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    for structure in ("matrix_free", "dual"):  # what torch does at first use, once for all
        fit_and_save(folder / structure, None, structure, "exact")
    for number in range(TRIALS):
        (folder / str(number)).mkdir()
        trial(folder / str(number), number)
    for structure, at in RANKS:
        place = folder / f"{structure} {at}"
        place.mkdir()
        trial_on_ranks(place, structure, at)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
