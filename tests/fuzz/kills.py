"""Kills: processes that save, or fit with a checkpoint, are ended (SIGKILL) at a random moment.

save    the file is absent or one of those that were being saved, byte by byte; the next save leaves nothing else
fit     the checkpoint is absent or whole, and a fit that goes on from it is the uninterrupted one, bit by bit
read    beside a process that saves two fits in turn, every load is one of the two
lock    a second fit with the same checkpoint is refused at once; after the kill it is not

`python tests/fuzz/kills.py --cases 200 --seed 0` prints counts and the seed of each failure; `--only SEED` repeats one
(the moment of a kill is a number of milliseconds, so what is under way then may differ).
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import files
from lapwing.curvature import checkpoint

FULL = {form: lw.curvature.Full(form) for form in ("primal", "dual")}
STRUCTURES: dict[str, Any] = {**FULL, "kron": "kron", "ekfac": "ekfac"}
WAYS = ("save", "fit", "save", "fit", "read", "lock")
READS = 20


def network() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 2)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(24, 3, generator=generator, dtype=torch.float64)
    return x, (x[:, 0] > 0).long()


class Batches:
    """Twelve batches of two, pass after pass."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data()
        for start in range(0, 24, 2):
            yield x[start : start + 2], y[start : start + 2]


class World:
    """What is known: the fits, their files, and the states of fits that nobody interrupts."""

    def __init__(self, folder: Path) -> None:
        self.model, self.folder = network(), folder
        pairs = [("kron", 1.0), ("full", 3.0)]
        fits = [lw.laplace(self.model, data(), "categorical", structure=s, prior=p) for s, p in pairs]
        (folder / "known").mkdir()
        for i, la in enumerate(fits):
            la.save(folder / "known" / str(i))
        self.fits, self.known = fits, [(folder / "known" / str(i)).read_bytes() for i in range(len(fits))]
        self.evidence = [float(la.log_evidence()) for la in fits]
        self.plain = {name: self.fit(name).state for name in STRUCTURES}

    def fit(self, name: str, **options: Any) -> lw.Laplace:
        batches = options.pop("batches", Batches())
        return lw.laplace(self.model, batches, "categorical", structure=STRUCTURES[name], **options)


def child(run: Callable[[Callable[[], None]], None]) -> tuple[int, int]:
    """A process that runs until it is killed, and the pipe by which it tells that it has begun."""
    receive, send = os.pipe()
    number = os.fork()
    if number == 0:
        try:
            run(lambda: os.write(send, b".") and None)  # type: ignore[func-returns-value]
        except BaseException as error:
            os.write(2, f"child: {type(error).__name__}: {error}\n".encode())
            os._exit(1)
        os._exit(0)
    os.close(send)
    return number, receive


def killed(number: int, pipe: int, after: float) -> bool:
    """Kill it so long after it has begun; whether it was still there. Raise if it failed on its own."""
    os.read(pipe, 1)
    time.sleep(after)
    os.kill(number, signal.SIGKILL)
    status = os.waitstatus_to_exitcode(os.waitpid(number, 0)[1])
    os.close(pipe)
    assert status in (0, -signal.SIGKILL), f"the child failed with {status}"
    return status != 0


def same_state(a: Any, b: Any) -> bool:
    """Bit by bit, whatever the order of names."""
    named = [[dict(sorted(one.items())) for one in (s.sums, s.statistics, s.basis)] for s in (a, b)]
    if [list(one) for one in named[0]] != [list(one) for one in named[1]]:
        return False
    trees = [(*three, [u for _, u in s.batches], s.n, s.targets) for three, s in zip(named, (a, b), strict=True)]
    mine, theirs = (torch.utils._pytree.tree_leaves(tree) for tree in trees)
    pairs = zip(mine, theirs, strict=True)
    return all(torch.equal(x, y) if isinstance(x, Tensor) else x == y for x, y in pairs)


# -- the ways ----------------------------------------------------------------------------------------------------------


def saving(world: World, path: Path) -> Callable[[Callable[[], None]], None]:
    def run(begun: Callable[[], None]) -> None:
        begun()
        while True:
            for la in world.fits:
                la.save(path)

    return run


def save(world: World, folder: Path, rng: random.Random) -> str:
    path = folder / "fit.safetensors"
    killed(*child(saving(world, path)), rng.uniform(0, 0.03))
    left = sorted(p.name for p in folder.iterdir())
    assert not path.exists() or path.read_bytes() in world.known, "a torn file"
    tmp = [name for name in left if name.endswith(".tmp")]
    assert left == sorted([*tmp, *([path.name] if path.exists() else [])]), left
    world.fits[0].save(path)
    assert [p.name for p in folder.iterdir()] == [path.name], f"the next save left {os.listdir(folder)}"
    assert float(lw.load(path, world.model).log_evidence()) == world.evidence[0]
    return f"save, {len(tmp)} unfinished"


def fit(world: World, folder: Path, rng: random.Random) -> str:
    path, name = folder / "fit.checkpoint", rng.choice(sorted(STRUCTURES))

    def run(begun: Callable[[], None]) -> None:
        begun()
        world.fit(name, checkpoint=path, every=1)

    there = killed(*child(run), rng.uniform(0, 0.12))
    batches = 0
    if path.exists():
        tensors, _ = files.read(path, checkpoint.SCHEMA, files.CHECKPOINT)
        batches = len(tensors["marks"])
    assert same_state(world.fit(name, checkpoint=path, every=1).state, world.plain[name]), f"{name}: other bits"
    assert not os.listdir(folder), f"the fit left {os.listdir(folder)}"
    return "fit, " + ("resumed" if batches else "begun anew" if there else "done before")


def read(world: World, folder: Path, rng: random.Random) -> str:
    path = folder / "fit.safetensors"
    world.fits[0].save(path)
    number, pipe = child(saving(world, path))
    seen = set()
    try:
        for _ in range(READS):
            found = float(lw.load(path, world.model).log_evidence())
            assert found in world.evidence, "a load of two files at once"
            seen.add(found)
    finally:
        killed(number, pipe, 0.0)
    return f"read, {len(seen)} of 2 fits seen"


def lock(world: World, folder: Path, rng: random.Random) -> str:
    path, name = folder / "fit.checkpoint", rng.choice(sorted(STRUCTURES))

    def run(begun: Callable[[], None]) -> None:
        world.fit(name, batches=Begun(begun, path), checkpoint=path, every=1)

    number, pipe = child(run)
    os.read(pipe, 1)
    said = "nothing"
    try:
        world.fit(name, checkpoint=path, every=1)
    except lw.errors.InvalidValue as error:
        said = str(error)
    assert f"in use by process {number} " in said, f"two fits with one checkpoint: {said}"
    os.kill(number, signal.SIGKILL)
    os.waitpid(number, 0)
    os.close(pipe)
    assert same_state(world.fit(name, checkpoint=path, every=1).state, world.plain[name]), f"{name}: other bits"
    assert not os.listdir(folder), f"the fit left {os.listdir(folder)}"
    return "lock, refused"


class Begun(Batches):
    """Batches that stop for good once there is a checkpoint."""

    def __init__(self, begun: Callable[[], None], path: Path) -> None:
        self.told, self.path = begun, path

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for batch in super().__iter__():
            if self.path.exists():
                self.told()
                time.sleep(600)
            yield batch


# -- all of them -------------------------------------------------------------------------------------------------------


def case(seed: int, world: World) -> str:
    rng = random.Random(seed)
    way = {"save": save, "fit": fit, "read": read, "lock": lock}[WAYS[seed % len(WAYS)]]
    with tempfile.TemporaryDirectory(dir=world.folder) as folder:
        return way(world, Path(folder), rng)


def run(seeds: range | list[int]) -> dict[str, Any]:
    counts, failures = Counter(), []  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        world = World(Path(folder))
        for seed in seeds:
            try:
                counts[case(seed, world)] += 1
            except Exception as error:
                failures.append({"seed": seed, "what": f"{type(error).__name__}: {error}"})
                print(f"seed {seed}: {type(error).__name__}: {error}", flush=True)
    return {"cases": len(seeds), "outcomes": dict(sorted(counts.items())), "failures": failures}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="repeat the case of this seed")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)  # a forked child has no other threads
    seeds = range(given.seed, given.seed + given.cases) if given.only is None else [given.only]
    start = time.time()
    found = run(seeds) | {"seed": seeds[0], "seconds": round(time.time() - start, 1)}
    told = f"{found['cases']} kills in {found['seconds']} s: {found['outcomes']}"
    print(f"{told}; {len(found['failures'])} failures")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
