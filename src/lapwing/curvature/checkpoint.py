"""Checkpoints: a pass over data that was stopped at any batch goes on to the same state, bit by bit.

The file holds all that changes in the loop: the accumulator's sums and the rows that it has gathered, the statistics,
the state of the generator, the basis of a second pass, and a digest of every batch so far. On a resume those batches
are loaded again and held to their digests, which takes no run of the network. A checkpoint of another fit is refused.

One fit at a time has a checkpoint: it holds a lock on it (locks.py).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import files, locks, tree
from lapwing.curvature.mutable import check_like, check_objects, held, put_back
from lapwing.curvature.parts import Part
from lapwing.curvature.state import SAME, State
from lapwing.distributed import Ranks
from lapwing.errors import BrokenFile, InvalidValue, warn
from lapwing.likelihoods import Likelihood
from lapwing.packing import Entries, Tensors, pack_plain, pack_tree, sound, unpack_plain, unpack_tree

if TYPE_CHECKING:
    from lapwing.curvature.accumulate import Pass

SCHEMA = 2
EVERY = 100  # batches
ANEW = "delete it to begin anew, or give another path"


@dataclass(frozen=True)
class FitCheckpoint:
    """Where a fit is kept while it runs, and after how many batches each; the file goes when the fit is done."""

    path: Path
    every: int = EVERY
    last: bool = True  # no pass comes after: the fit is done, and this pass has the lock

    def __post_init__(self) -> None:
        if not isinstance(self.every, int) or isinstance(self.every, bool) or self.every < 1:
            raise InvalidValue(f"every is a number of batches, at least 1; got {self.every!r}")

    def within(self) -> FitCheckpoint:
        """For a pass that another follows."""
        return replace(self, last=False)

    def opened(self, structures: list[str], identity: dict[str, Any], outputs: Tensor, ranks: Ranks) -> FitJournal:
        """The journal of the pass of structures[0]; the others are those of the passes before it. What is in the file
        is taken up if it is of this pass, left for later if it is of one before, and refused if it is of another fit.
        Each rank has a file of its own."""
        path = self.path if ranks.alone else self.path.with_name(f"{self.path.name}.rank{ranks.rank}")
        identity = {**identity, "the number of ranks": ranks.size}
        journal = FitJournal(replace(self, path=path), structures[0], identity, outputs.detach())
        try:
            with ranks.sharing_errors(f"opening the checkpoint {self.path}"):
                journal.open(structures)
        except BaseException:  # here, or on another rank
            journal.lock.close()
            raise
        return journal


def as_checkpoint(path: str | os.PathLike[str] | FitCheckpoint | None, every: int | None) -> FitCheckpoint | None:
    """A path, or a FitCheckpoint, written after every so many batches; None is none."""
    if path is None:
        if every is not None:
            raise InvalidValue(f"every={every} says how often to write a checkpoint; give checkpoint=, where to")
        return None
    place = path if isinstance(path, FitCheckpoint) else FitCheckpoint(files.as_path(path))
    return place if every is None else replace(place, every=every)


@dataclass
class FitJournal:
    """One pass with its checkpoint. It begins anew if there is none (no header)."""

    place: FitCheckpoint
    structure: str
    identity: dict[str, Any]  # of the fit, in words; each must be the same
    outputs: Tensor = field(repr=False)  # of the network at the first of the data; the same to rounding
    marks: list[list[int]] = field(default_factory=list)  # the digest and the number of examples of each batch
    tensors: dict[str, Tensor] = field(default_factory=dict, repr=False)
    header: dict[str, Any] | None = None
    start: Tensor | None = None  # of the fit's generator, when the pass began
    lock: ExitStack = field(default_factory=ExitStack, repr=False)

    def __enter__(self) -> FitJournal:
        return self

    def __exit__(self, *error: Any) -> None:
        self.lock.close()

    def open(self, structures: list[str]) -> None:
        """Lock the checkpoint, and take up what is there."""
        path = files.check_target(self.place.path)
        with ExitStack() as lock:
            if self.place.last:
                lock.enter_context(locks.alone(path, "the checkpoint"))
            files.remove_unfinished(path)
            if path.exists():
                self.read(structures)
            self.lock = lock.pop_all()

    def read(self, structures: list[str]) -> None:
        """Read the file and hold it to this fit; keep what it holds if it is of this pass."""
        tensors, header = files.read(self.place.path, SCHEMA, files.CHECKPOINT, ANEW)
        with self._whole():
            _check_entries(tensors, header)
        self.check(tensors, header, structures)
        if header["structure"] == self.structure:
            self.tensors, self.header = tensors, header
            self.marks, self.start = tensors["marks"].tolist(), self.tensors["start"]

    @contextmanager
    def _whole(self) -> Iterator[None]:
        try:
            yield
        except BrokenFile as error:
            raise BrokenFile(f"{self.place.path} is broken: {error}; {ANEW}") from error

    def done(self) -> None:
        """Remove the file once the last pass has ended."""
        if self.place.last:
            self.place.path.unlink(missing_ok=True)

    def check(self, tensors: dict[str, Tensor], header: dict[str, Any], structures: list[str]) -> None:
        """Refuse the checkpoint of another fit."""
        where = f"{self.place.path} is a checkpoint of another fit"
        if header["structure"] not in structures:
            raise InvalidValue(f"{where}: its structure is {header['structure']}, not {self.structure}; {ANEW}")
        theirs = header["identity"]
        for what in {**self.identity, **theirs}:
            if theirs.get(what) != self.identity.get(what):
                now = f"it had {theirs.get(what)}, this one {self.identity.get(what)}"
                raise InvalidValue(f"{where}: {what} differs ({now}); give the same, or {ANEW}")
        then = tensors["outputs"].to(self.outputs)
        if then.shape != self.outputs.shape or not torch.allclose(then, self.outputs, rtol=SAME, atol=SAME):
            raise InvalidValue(
                f"{where}: the network gives other outputs at the same weights; give the same forward= and code, "
                f"or {ANEW}"
            )
        if header["machine"] != machine():
            warn(
                f"{self.place.path} was written with {header['machine']} and this is {machine()}: sums are the same to "
                "rounding, but not to the last bit",
            )

    @property
    def label(self) -> str:
        """To add to that of the progress bar."""
        return f", resumed at batch {len(self.marks)}" if self.header else ""

    def basis(self, empty: State, ranks: Ranks) -> State | None:
        """The empty state in the basis of this pass, if the pass had begun, on this rank or on another."""
        found = None
        if self.header is not None:
            tensors = {k.removeprefix("basis."): v for k, v in self.tensors.items() if k.startswith("basis.")}
            with self._whole():
                found = tensors, [unpack_plain(Part, part, "its part") for part in self.header["parts"]], self.start
        found = ranks.first(found, "the basis in the checkpoint")
        if found is None:
            return None
        self.start = found[2]
        tensors = {key: value.to(empty.tangent.device) for key, value in found[0].items()}
        parts = tuple(Part(**part) for part in found[1])
        self._check_basis(empty, tensors, parts)
        return replace(empty, basis=tensors, parts=parts)

    def _check_basis(self, empty: State, tensors: dict[str, Tensor], parts: tuple[Part, ...]) -> None:
        with self._whole(), sound("its basis"):
            wanted = empty.structure.keeps(empty.layout, parts, empty.terms, empty.factor)
            if wanted is not None:
                Tensors(tensors, self.place.path).expected("", wanted[1])

    def begin(self, generator: torch.Generator) -> None:
        """The generator as it was when the pass began: passes before it, which drew from it, are not made again."""
        if self.start is not None:
            generator.set_state(self.start)
        self.start = generator.get_state()

    def resume(self, running: Any, generator: torch.Generator, likelihood: Likelihood, device: torch.device) -> None:
        """Put back what the pass had, if it had begun."""
        if not hasattr(running.accumulator, "mutable"):
            raise InvalidValue(
                f"{self.structure} has no checkpoints: its {type(running.accumulator).__name__} does not name its "
                "`mutable` attributes; leave checkpoint= away, or name them"
            )
        if self.header is not None:
            with self._whole(), sound("its pass"):
                self._restore(running, device)
                likelihood.check_shapes(running.statistics)
            generator.set_state(self.tensors["generator"])
            self.tensors = {}

    def _restore(self, running: Any, device: torch.device) -> None:
        assert self.header is not None
        found = Tensors({k: v for k, v in self.tensors.items() if k.startswith("run.")}, self.place.path)
        kept = unpack_tree(self.header["run"], found, device)
        found.done()
        check_like(held(running), kept, "run")
        put_back(running, kept)
        check_objects(running)
        parts = [pack_plain(part) for part in getattr(running.accumulator, "parts", ())]
        if json.loads(json.dumps(parts)) != self.header["parts"]:
            raise BrokenFile(f"its parts are {self.header['parts']}, and those of the network are {parts}")
        if {k for k in self.tensors if k.startswith("basis.")} != _named(getattr(running.accumulator, "basis", {})):
            raise BrokenFile("it is in another basis")
        if running.n != sum(n for _, n in self.marks):
            raise BrokenFile(f"it has seen {running.n} examples in batches of {[n for _, n in self.marks]}")

    def through(self, batches: Iterable[Any], running: Any, generator: torch.Generator) -> Iterator[tuple[Any, Any]]:
        """The batches that are left, after those that were seen; a checkpoint is written after every few, once the one
        that was handed out is done with."""
        before, position = len(self.marks), 0
        for position, (x, y) in enumerate(batches, 1):
            mark = [digest((x, y)), len(y) if isinstance(y, Tensor) else 0]
            if position <= before:
                self._compare(position, mark)
                continue
            yield x, y
            self.marks.append(mark)
            if position % self.place.every == 0:
                self.write(running, generator)
        if position < before:
            raise InvalidValue(f"{self._had} {before} batches, and the data hold {position}; {self._do}")

    def _compare(self, position: int, mark: list[int]) -> None:
        seen = self.marks[position - 1]
        if mark != seen:
            found = "others than" if mark[1] == seen[1] else f"{mark[1]} examples, not"
            now = f"batch {position} now holds {found} the {seen[1]} of then"
            raise InvalidValue(f"{self._had} other data: {now}; {self._do}")

    @property
    def _had(self) -> str:
        return f"the fit in {self.place.path} has seen"

    @property
    def _do(self) -> str:
        return f"give the same data in the same batches and order (shuffle=False, or the same seed), or {ANEW}"

    def write(self, running: Any, generator: torch.Generator) -> None:
        """Write what the pass holds, in place of the last file."""
        accumulator, tensors = running.accumulator, {}  # type: ignore[var-annotated]
        run = pack_tree(held(running), "run", tensors)
        tensors |= {f"basis.{k}": v for k, v in getattr(accumulator, "basis", {}).items()}
        assert self.start is not None
        tensors |= {"generator": generator.get_state(), "start": self.start}
        tensors |= {"marks": torch.tensor(self.marks), "outputs": self.outputs}
        header = {
            "schema": SCHEMA,
            "structure": self.structure,
            "identity": self.identity,
            "machine": machine(),
            "parts": [pack_plain(part) for part in getattr(accumulator, "parts", ())],
            "run": run,
        }
        files.write(self.place.path, tensors, header, files.CHECKPOINT)


def _check_entries(tensors: dict[str, Tensor], header: dict[str, Any]) -> None:
    """What every checkpoint has."""
    entries, found = Entries(header), Tensors(tensors, "")
    for key, kind in [("schema", "int"), ("structure", "str"), ("machine", "str"), ("parts", "list")]:
        entries.take(key, kind)
    entries.take("identity", "dict"), entries.take("run", "dict")
    entries.done()
    for name in ("generator", "start"):
        with sound(f"its {name}"):
            torch.Generator().set_state(found.take(name, torch.Generator().get_state().shape, torch.uint8))
    marks = found.take("marks", dtype=torch.int64)
    if marks.ndim != 2 or marks.shape[1] != 2 or not len(marks) or bool((marks[:, 1] < 0).any()):
        raise found.broken(f"has marks of batches {tuple(marks.shape)}, not a digest and a number for each")
    found.finite("outputs")
    for name in list(found.left):
        if not name.startswith(("run.", "basis.")):
            raise found.broken(f"has a tensor {name!r}, which nobody knows")


def _named(basis: dict[str, Tensor]) -> set[str]:
    return {f"basis.{key}" for key in basis}


# -- what a fit is of, so that a stopped one goes on from nothing else -------------------------------------------------


def identity(one: Pass, first: Any, basis: State | None) -> dict[str, Any]:
    """What a fit is of, in words; bits follow from it, the structure and the data. first: the first inputs."""
    tangent, likelihood = one.tangent, one.likelihood
    hyperparameters = {name: value.tolist() for name, value in likelihood.hyperparameters.items()}
    given = {} if basis is None else basis.basis or basis.sums
    return {
        "the version of torch": torch.__version__,
        "the device": tangent.device.type,
        "the output factor": repr(one.factor),
        "the likelihood": f"{likelihood.kind}{hyperparameters or ''}",
        "the set of parameters": {n: list(s) for n, s in tangent.layout.shapes.items()},
        "the masks of parameters": tree.fingerprints(tangent.layout.masks),
        "the use of a forward= hook": tangent.custom_forward,
        **{f"the value of {name}": mark for name, mark in tangent.fingerprints().items()},
        "the number of examples": one.seen.n,
        "the first of the data": digest(first),
        "the state of the generator at the start": tree.fingerprints({"": one.generator.get_state()})[""],
        "the basis given": tree.fingerprints(given),
    }


def machine() -> str:
    """What bits may depend on though the sums do not."""
    return f"{torch.get_num_threads()} threads on {torch.backends.cpu.get_cpu_capability()}"


def digest(batch: Any) -> int:
    """Of the bits of a batch: its tensors, numbers and strings; of other objects their class alone."""
    words: list[str] = []
    for leaf in tree.leaves(batch):
        if isinstance(leaf, Tensor):
            sparse = None if leaf.layout is torch.strided else leaf.to_sparse_coo().coalesce()
            found = {"": leaf} if sparse is None else {"indices": sparse.indices(), "values": sparse.values()}
            words += tree.fingerprints(found).values()
        else:
            words.append(repr(leaf) if leaf is None or isinstance(leaf, (int, float, str)) else type(leaf).__name__)
    return int.from_bytes(hashlib.blake2b(repr(words).encode(), digest_size=8).digest(), "big", signed=True)
