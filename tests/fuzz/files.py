"""Mutated files: what a damaged or forged file does when it is loaded, or when a fit goes on from it.

raw       bits flipped, bytes cut, added, zeroed or moved: refused, if a single bit is another
forged    entries and tensors changed, and the digest made anew: refused, the same fit, or another fit that is sound
          ("plausible": another finite number where a number was). What cannot be one must be refused.

Never an exception that is not a LapwingError, never a hang. `python tests/fuzz/files.py --cases 5000 --seed 0` prints
counts and the seed of each failure; `--only SEED` repeats one.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import random
import re
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import lapwing as lw
from lapwing import files, io
from lapwing.curvature import checkpoint

LIMIT = 30  # seconds a case may take


# -- the files ---------------------------------------------------------------------------------------------------------


def network(seed: int = 0) -> nn.Module:
    """3 -> 4 -> 2, with a normalization layer whose scales get blocks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 2)).double()
        nn.init.normal_(net[1].weight)
    return net


def data(labels: bool = False) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(12, 3, generator=generator, dtype=torch.float64)
    noise = torch.randn(12, 2, generator=generator, dtype=torch.float64)
    return x, (noise[:, 0] > 0).long() if labels else noise


def masks() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    some = torch.rand(4, 3, generator=generator) < 0.6
    some[0, :2] = torch.tensor([True, False])
    return {"0.weight": some, "3.bias": torch.tensor([False, True])}


PER_OUTPUT = lw.likelihoods.Gaussian(torch.tensor([0.3, 0.7], dtype=torch.float64))
CORRELATED = lw.likelihoods.CorrelatedGaussian(torch.tensor([[0.5, 0.2], [0.2, 0.4]], dtype=torch.float64))
CLASSES = lw.likelihoods.ClassWeighted(lw.likelihoods.Categorical(), torch.tensor([1.0, 2.0]))
FITS: dict[str, dict[str, Any]] = {
    "primal": {"structure": lw.curvature.Full("primal"), "prior": "layerwise"},
    "dual": {"structure": lw.curvature.Full("dual"), "likelihood": PER_OUTPUT},
    "kron": {"structure": "kron", "likelihood": "categorical", "prior": {"*weight": 0.5, "*bias": 2.0}},
    "kron, correlated": {"structure": "kron", "likelihood": CORRELATED},
    "ekfac": {"structure": "ekfac", "likelihood": CLASSES},
    "diag": {"structure": "diag", "likelihood": PER_OUTPUT, "prior": lw.priors.GPrior(per="layer")},
    "block": {"structure": "block", "factor": "empirical"},
    "lowrank": {"structure": lw.curvature.LowRank(5), "prior": lw.priors.Gaussian(0.3, mean=0.1)},
    "lowrank, 2 passes": {"structure": lw.curvature.LowRank(5, 2)},
    "masks": {"structure": "kron", "subset": masks()},
    "matrix_free": {"structure": lw.curvature.MatrixFree(samples=4, rank=3)},
}
PASSES: dict[str, Any] = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "kron": "kron",
    "ekfac": "ekfac",
    "lowrank": lw.curvature.LowRank(5, 2),
}


class Stopped(Exception):
    pass


class Batches:
    """Four batches of three, pass after pass; stopped before batch `at` of all."""

    def __init__(self, at: int = -1) -> None:
        self.at, self.count = at, 0

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        x, y = data(labels=True)
        for start in range(0, 12, 3):
            if self.count == self.at:
                raise Stopped
            self.count += 1
            yield x[start : start + 3], y[start : start + 3]


def saved(name: str, folder: Path) -> tuple[bytes, Callable[[Path], Any]]:
    """A fit's file, and what a file is worth: every number that is asked of it."""
    options = dict(FITS[name])
    likelihood = options.pop("likelihood", "gaussian")
    labels = likelihood in ("categorical", CLASSES)
    la = lw.laplace(network(), data(labels), likelihood, **options)
    if name in ("primal", "lowrank"):
        la = la.tuned(fixed=("noise",)) if name == "primal" else la.recentered()
    if name == "matrix_free":
        la.log_evidence()
    la.save(folder / "file")
    return (folder / "file").read_bytes(), lambda path: worth(lw.load(path, network()))


def worth(la: lw.Laplace) -> list[Any]:
    pred = la.predict(data()[0][:3])
    numbers = [pred.f_mean, pred.covariance, pred.mean, la.posterior.draw(2)]
    if not la.streams:
        numbers += [la.log_evidence(), la.effective_dimension()]
    return [repr(la), la.coverage, *numbers]


def begun(name: str, folder: Path) -> tuple[bytes, Callable[[Path], Any]]:
    """The checkpoint of a fit that was stopped in its last pass, and the sums of one that goes on from it."""
    path, passes = folder / "checkpoint", 2 if name in ("ekfac", "lowrank") else 1
    options = {"structure": PASSES[name], "checkpoint": path, "every": 1}
    before = 2 + 4 + 4 * (passes - 1)  # two looks at the first batch, the counting, and passes before
    with contextlib.suppress(Stopped):
        lw.laplace(network(), Batches(before + 2), "categorical", **options)
    content = path.read_bytes()
    path.unlink()

    def resume(path: Path) -> Any:
        la = lw.laplace(network(), Batches(), "categorical", **{**options, "checkpoint": path})
        state = la.state
        named = [one[key] for one in (state.sums, state.statistics, state.basis) for key in sorted(one)]
        return [repr(la), *named, *worth(la)]

    return content, resume


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.shape == b.shape and torch.equal(a, b)
    return type(a) is type(b) and (len(a) == len(b) and all(map(same, a, b)) if isinstance(a, list) else a == b)


# -- raw mutations -----------------------------------------------------------------------------------------------------


def flip(rng: random.Random, content: bytearray) -> bytearray:
    for _ in range(rng.choice([1, 1, 1, 2, 9])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    return content


def cut(rng: random.Random, content: bytearray) -> bytearray:
    return content[: rng.choice([0, 3, 8, len(content) - 1, rng.randrange(len(content))])]


def lengthen(rng: random.Random, content: bytearray) -> bytearray:
    return content + rng.randbytes(rng.choice([1, 8, 500]))


def zero(rng: random.Random, content: bytearray) -> bytearray:
    start = rng.randrange(len(content))
    content[start : start + 64] = bytes(len(content[start : start + 64]))
    return content


def move(rng: random.Random, content: bytearray) -> bytearray:
    a, b = sorted(rng.sample(range(len(content) // 8), 2))
    content[8 * a : 8 * a + 8], content[8 * b : 8 * b + 8] = content[8 * b : 8 * b + 8], content[8 * a : 8 * a + 8]
    return content


def remove(rng: random.Random, content: bytearray) -> bytearray:
    start = rng.randrange(len(content))
    del content[start : start + rng.choice([1, 8])]
    return content


def length(rng: random.Random, content: bytearray) -> bytearray:
    content[:8] = rng.choice([0, 1, len(content), 2**40, 2**63, 2**64 - 1]).to_bytes(8, "little")
    return content


RAW = [flip, flip, flip, cut, lengthen, zero, move, remove, length]


# -- the text around the tensors ---------------------------------------------------------------------------------------


def sealed(described: bytes, body: bytes) -> bytes:
    """A file of this JSON with the digest that it should have: of all its bytes but those of the digest."""
    size, found = len(described).to_bytes(8, "little"), re.match(rb'{"__metadata__":{"[a-z.]+":"', described)
    if found is None:
        return size + described + body
    start = found.end()
    kept = size + described[:start] + described[start + 64 :] + body
    digest = hashlib.blake2b(kept, digest_size=32).hexdigest().encode()
    return size + described[:start] + digest + described[start + 64 :] + body


def text(rng: random.Random, content: bytearray) -> bytes:
    """What the JSON says of the tensors is changed, or the JSON itself."""
    n = int.from_bytes(content[:8], "little")
    described, body = bytes(content[8 : 8 + n]), bytes(content[8 + n :])
    entries = json.loads(described)
    name = rng.choice([key for key in entries if key != "__metadata__"])
    entry = entries[name]
    how = rng.randrange(12)
    if how == 0:
        entry["dtype"] = rng.choice(["F32", "I64", "F64", "BOOL", "Q4", 7, None])
    elif how == 1:
        entry["shape"] = rng.choice([[-1], [2**62, 4], [0, 2**70], [1.5], "4", [], None, [*entry["shape"], 1]])
    elif how == 2:
        entry["data_offsets"] = rng.choice([[0, 8], [-8, 8], [8, 0], [0], [0, 2**70], None, [0.0, 8.0], "08"])
    elif how == 3:
        other = rng.choice([key for key in entries if key != "__metadata__"])
        entry["data_offsets"] = entries[other]["data_offsets"]
    elif how == 4:
        del entries[name]
    elif how == 5:
        entries["another"] = entry
    elif how == 6:
        entry["more"] = 1
    elif how == 7:
        entries[name] = rng.choice([None, 3, [], "x"])
    elif how == 8:
        entries["__metadata__"]["lapwing" if rng.random() < 0.5 else "more"] = rng.choice([3, None, {}])
    made = json.dumps(entries, separators=(",", ":")).encode()
    if how == 9:
        made = made[:-1] + b"," + json.dumps(name).encode() + b":" + json.dumps(entry).encode() + b"}"
    elif how == 10:
        made = made[:-1] + b',"deep":' + b"[" * 99_999 + b"]" * 99_999 + b"}"
    elif how == 11:
        made = made[:-1] + b',"\xff\xfe":1}'
    return sealed(made + b" " * (-len(made) % 8), body)


# -- forged headers and tensors ----------------------------------------------------------------------------------------

OTHER = ["x", "", [], {}, [1], {"a": 1}, True, None]
LEFT_OUT = ("targets", "tuning")  # that may be None
Content = tuple[dict[str, Tensor], dict[str, Any]]


def places(x: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Of every value in a tree of JSON."""
    pairs = x.items() if isinstance(x, dict) else enumerate(x) if isinstance(x, list) else ()
    for key, value in pairs:
        yield (*path, key)
        yield from places(value, (*path, key))


def at(header: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        header = header[key]
    return header


def some_place(rng: random.Random, header: Any, wanted: Callable[[Any], bool]) -> tuple[Any, Any] | None:
    found = [path for path in places(header) if wanted(at(header, path))]
    if not found:
        return None
    top = rng.choice(sorted({path[0] for path in found}))  # fingerprints are many
    path = rng.choice([path for path in found if path[0] == top])
    return at(header, path[:-1]), path[-1]


def drop_entry(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    inside, key = some_place(rng, header, lambda _: True)  # type: ignore[misc]
    del inside[key]


def rename_entry(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    found = [path for path in places(header) if isinstance(path[-1], str)]
    path = rng.choice(found)
    inside = at(header, path[:-1])
    inside[path[-1] + "_"] = inside.pop(path[-1])


def add_entry(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    found = [(), *(path for path in places(header) if isinstance(at(header, path), dict))]
    at(header, rng.choice(found))["more"] = rng.choice([*OTHER, 3])


def retype_entry(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    inside, key = some_place(rng, header, lambda _: True)  # type: ignore[misc]
    kinds = [v for v in OTHER if type(v) is not type(inside[key]) and not (v is None and key in LEFT_OUT)]
    inside[key] = rng.choice(kinds)


def change_number(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    inside, key = some_place(rng, header, lambda v: type(v) in (int, float))  # type: ignore[misc]
    value = inside[key]
    inside[key] = rng.choice([value + 1, -value, value * 2, -1, 0, 2**70, float("nan"), float("inf"), value + 0.5])


def change_string(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    inside, key = some_place(rng, header, lambda v: type(v) is str)  # type: ignore[misc]
    known = ["Gaussian", "Categorical", "Custom", "Reweighted", "Kronecker", "Diagonal", "Full", "MatrixFree", "os"]
    known += ["map", "tangent", "exact", "dual", "primal", "auto", "kron", "dense", "0.weight", "system", "__main__"]
    inside[key] = rng.choice([value for value in known if value != inside[key]])


def other_class(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    what = rng.choice([key for key in ("structure", "prior", "likelihood_object") if key in header] or ["structure"])
    if not isinstance(header[what], dict):  # of a checkpoint
        header[what] += "x"
        return
    names = ["Unknown", "Popen", "subprocess", "lapwing.files", "Block"]
    header[what][rng.choice(["kind", "module"])] = rng.choice([name for name in names if name != header[what]["kind"]])


def drop_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    del tensors[rng.choice(sorted(tensors))]


def rename_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    name = rng.choice(sorted(tensors))
    tensors[rng.choice([name + "_", "sums.x", "x"])] = tensors.pop(name)


def add_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    prefix = rng.choice(["", "sums.", "basis.", "statistics.", "mask.", "prior.", "run.", "batch.9."])
    tensors[prefix + "more"] = torch.zeros(rng.choice([(), (2,), (3, 3)]), dtype=torch.float64)


def some_numbers(rng: random.Random, tensors: dict[str, Tensor]) -> str:
    return rng.choice(sorted(name for name, t in tensors.items() if t.is_floating_point() and t.numel()))


def spoil_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    name = some_numbers(rng, tensors)
    t = tensors[name] = tensors[name].clone()
    t.view(-1)[rng.randrange(t.numel())] = rng.choice([float("nan"), float("inf"), -float("inf")])


def cast_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    name = rng.choice(sorted(tensors))
    kinds = [torch.float16, torch.int32, torch.uint8 if tensors[name].dtype != torch.uint8 else torch.int8]
    tensors[name] = tensors[name].to(rng.choice(kinds))


def reshape_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    name = rng.choice(sorted(tensors))
    t = tensors[name]
    flat = t.reshape(-1)
    ways = [flat if t.ndim != 1 else t.reshape(1, -1), t.unsqueeze(-1), flat[:0], torch.cat([flat, flat])]
    tensors[name] = rng.choice(ways).contiguous()


def change_tensor(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    name = some_numbers(rng, tensors)
    t = tensors[name].clone()
    how = rng.randrange(4)
    if how == 0:
        t.view(-1)[rng.randrange(t.numel())] *= 1.5
    elif how == 1:
        t = -t
    elif how == 2:
        t = t * rng.choice([0.0, 1e-6, 1e6] if name.startswith("prior.") else [0.0, 1e-300, 1e300])
    else:
        t = t.flip(-1) if t.ndim else t + 1
    tensors[name] = t


def swap_tensors(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    a, b = rng.sample(sorted(tensors), 2)
    tensors[a], tensors[b] = tensors[b], tensors[a]


def drop_mask(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    if not header.get("masks"):
        return drop_tensor(rng, tensors, header)
    name = rng.choice(header["masks"])
    how = rng.randrange(3)
    if how != 1:
        del tensors[f"mask.{name}"]
    if how != 2:
        header["masks"].remove(name)
    return None


def drop_part(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    """With its sums, or without."""
    if not header.get("parts"):
        return drop_tensor(rng, tensors, header)
    gone = header["parts"].pop(rng.randrange(len(header["parts"])))
    for name in [name for name in tensors if f".{gone['name']}/" in name] if rng.random() < 0.7 else []:
        del tensors[name]
    return None


def repeat_part(rng: random.Random, tensors: dict[str, Tensor], header: Any) -> None:
    if not header.get("parts"):
        return add_tensor(rng, tensors, header)
    part = rng.choice(header["parts"])
    header["parts"].append({**part, "name": part["name"] + rng.choice(["", "_"])})
    return None


REFUSED = [
    *(drop_entry, add_entry, rename_entry, retype_entry, drop_tensor, rename_tensor, add_tensor, spoil_tensor),
    *(cast_tensor, reshape_tensor, drop_mask, drop_part, repeat_part, other_class),
]
PLAUSIBLE = [change_number, change_number, change_string, change_tensor, change_tensor, swap_tensors]


# -- one case ----------------------------------------------------------------------------------------------------------


class World:
    """The files, their worth, and a folder to work in; made once."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.known = folder, {}  # type: ignore[var-annotated]

    def file(self, kind: str, name: str) -> tuple[bytes, Callable[[Path], Any], Any]:
        if (kind, name) not in self.known:
            content, run = (saved if kind == "saved" else begun)(name, self.folder)
            self.known[kind, name] = content, run, run(self.place(content))
        return self.known[kind, name]

    def place(self, content: bytes) -> Path:
        path = self.folder / "mutated"
        path.write_bytes(content)
        return path


def forged(rng: random.Random, kind: str, world: World, content: bytes) -> tuple[str, bytes, bool]:
    """How it was changed, the file, and whether it must be refused."""
    if rng.random() < 0.2:
        return "text", text(rng, bytearray(content)), True
    key, schema = (files.SAVED, io.SCHEMA) if kind == "saved" else (files.CHECKPOINT, checkpoint.SCHEMA)
    tensors, header = files.read(world.place(content), schema, key)
    must = rng.random() < 0.6
    change = rng.choice(REFUSED if must else PLAUSIBLE)
    change(rng, tensors, header)
    files.write(world.folder / "mutated", tensors, header, key)
    return change.__name__, (world.folder / "mutated").read_bytes(), must


def case(seed: int, world: World) -> tuple[str, str]:
    """Its outcome and what it was; an outcome in capitals is a failure."""
    rng = random.Random(seed)
    kind = rng.choice(["saved", "saved", "saved", "begun"])
    name = rng.choice(sorted(FITS if kind == "saved" else PASSES))
    content, run, expected = world.file(kind, name)
    if rng.random() < 0.5:
        change = rng.choice(RAW)
        how, mutated, must, way = change.__name__, bytes(change(rng, bytearray(content))), True, "raw"
    else:
        how, mutated, must = forged(rng, kind, world, content)
        way = "forged"
    what = f"{way} {how} of {kind} {name}"
    if mutated == content:
        return "unchanged", what
    path = world.place(mutated)
    try:
        with limited():
            found = run(path)
    except lw.errors.LapwingError as error:
        return "refused", f"{what}: {error}"
    except BaseException as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{last.name} at {Path(last.filename).name}:{last.lineno}"
        return "CRASH", f"{what}: {type(error).__name__}: {error} in {place}"
    finally:
        (world.folder / "mutated").unlink(missing_ok=True)
    if same(found, expected) and way == "forged":
        return "same", what
    if any(isinstance(t, Tensor) and not bool(torch.isfinite(t).all()) for t in found):
        return "NOT FINITE", what
    return ("DIFFERENT" if must else "plausible"), what


@contextlib.contextmanager
def limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise TimeoutError(f"it took more than {LIMIT} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(LIMIT)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def run(seeds: range | list[int], loud: bool = False) -> dict[str, Any]:
    """Outcomes by their number, and failures with their seeds."""
    counts, ways, failures = Counter(), Counter(), []  # type: ignore[var-annotated]
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        world = World(Path(folder))
        for seed in seeds:
            outcome, what = case(seed, world)
            counts[outcome] += 1
            ways[f"{what.split()[0]} {outcome}"] += 1
            if outcome.isupper():
                failures.append({"seed": seed, "outcome": outcome, "what": what})
                print(f"seed {seed}: {outcome}: {what}", flush=True)
            elif loud:
                print(f"seed {seed}: {outcome}: {what}", flush=True)
    return {"cases": len(seeds), "outcomes": dict(counts), "by way": dict(sorted(ways.items())), "failures": failures}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case; the others follow")
    parser.add_argument("--only", type=int, help="repeat the case of this seed, and say how it ended")
    parser.add_argument("--loud", action="store_true", help="say how each case ended")
    parser.add_argument("--out", type=Path, help="a JSON file for the counts")
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    seeds = range(given.seed, given.seed + given.cases) if given.only is None else [given.only]
    start = time.time()
    found = run(seeds, loud=given.loud or given.only is not None)
    found |= {"seed": seeds[0], "seconds": round(time.time() - start, 1)}
    told = f"{found['cases']} mutated files in {found['seconds']} s: {found['by way']}"
    print(f"{told}; {len(found['failures'])} failures")
    if given.out is not None:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(found, indent=1))
    return 1 if found["failures"] else 0


if __name__ == "__main__":
    sys.exit(main())
