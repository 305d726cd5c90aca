"""Checkpoints of a walk: one that was stopped goes on to the same bits.

The file holds all that changes: the chains' state, their generators, the draws so far and what was told of them. It is
written after every so many steps, held to the walk that finds it (by what it is of, in words and digests), and removed
in the end. One walk at a time has it (locks.py).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import files, given, locks, tree
from lapwing.curvature.checkpoint import digest
from lapwing.errors import InvalidValue
from lapwing.packing import Entries, Tensors, pack_tree, sound, unpack_tree

if TYPE_CHECKING:
    from lapwing.samplers.target import Target
    from lapwing.samplers.walk import Plan, TransitionKernel, Walk

SCHEMA = 2
EVERY = 100  # steps
ANEW = "delete it to begin anew, or give another path"


@dataclass
class WalkJournal:
    """A walk's checkpoint, and what was found there."""

    path: Path
    every: int
    identity: dict[str, Any]
    found: tuple[dict[str, Tensor], dict[str, Any]] | None = None

    def read(self) -> None:
        """Take up what is there, if it is of this walk."""
        tensors, header = files.read(self.path, SCHEMA, files.WALK, ANEW)
        theirs = header.get("identity", {})
        for what in {**self.identity, **theirs}:
            if theirs.get(what) != self.identity.get(what):
                now = f"it had {theirs.get(what)}, this one {self.identity.get(what)}"
                raise InvalidValue(f"{self.path} is of another walk: {what} differs ({now}); give the same, or {ANEW}")
        self.found = tensors, header

    def wrote(self, t: int, walk: Walk) -> None:
        """Write where the walk is after t steps, if that is due."""
        if t % self.every:
            return
        tensors: dict[str, Tensor] = {}
        told = {name: torch.stack(values) for name, values in walk.told.items()}
        kept = torch.stack(walk.kept) if walk.kept else torch.zeros(0, *walk.state["q"].shape, dtype=torch.float64)
        held = {
            "state": walk.state,
            "origin": walk.origin,
            "alive": walk.alive,
            "lengths": walk.lengths,
            "kept": kept,
            "told": told,
        }
        run = pack_tree({**held, "streams": walk.streams.state()}, "run", tensors)
        header = {"schema": SCHEMA, "identity": self.identity, "steps": t, "run": run}
        files.write(self.path, tensors, header, files.WALK)

    def resume(self, walk: Walk) -> int:
        """Put back what the walk had; how many steps those were."""
        assert self.found is not None
        tensors, header = self.found
        with sound(f"the checkpoint {self.path}"):
            entries, left = Entries(header), Tensors(tensors, self.path)
            entries.take("schema", "int"), entries.take("identity", "dict")
            steps = entries.take("steps", "int", 1, walk.plan.steps)
            held = unpack_tree(entries.take("run", "dict"), left, walk.streams.device)
            entries.done()
            left.done()
            walk.state, walk.origin = held["state"], held["origin"]
            walk.alive, walk.lengths = held["alive"], held["lengths"]
            walk.kept, walk.told = list(held["kept"]), {name: list(values) for name, values in held["told"].items()}
            walk.streams.resume(held["streams"].cpu())
        return steps


@contextmanager
def opened(
    target: Target,
    kernel: TransitionKernel,
    plan: Plan,
    generator: torch.Generator,
    start: Any,
    checkpoint: str | os.PathLike[str] | None,
    every: int | None,
) -> Iterator[WalkJournal | None]:
    """The journal of a walk, locked; removed once the walk has ended."""
    if checkpoint is None:
        if every is not None:
            raise InvalidValue(f"every={every} says how often to write a checkpoint; give checkpoint=, where to")
        yield None
        return
    path = files.check_target(checkpoint)
    journal = WalkJournal(
        path, given.whole(every or EVERY, "every", 1), identity(target, kernel, plan, generator, start)
    )
    with locks.alone(path, "the checkpoint"):
        files.remove_unfinished(path)
        if path.exists():
            journal.read()
        yield journal
        path.unlink(missing_ok=True)


def identity(
    target: Target, kernel: TransitionKernel, plan: Plan, generator: torch.Generator, start: Any
) -> dict[str, Any]:
    """What a walk is of, in words; its bits follow from it."""
    joint = target.joint
    known = {name: value.tolist() for name, value in joint.likelihood.hyperparameters.items()}
    return {
        "the version of torch": torch.__version__,
        "the device": joint.tangent.device.type,
        "the method": repr(kernel),
        "the length of the walk": asdict(plan),
        "the temperature": target.temperature,
        "the likelihood": f"{joint.likelihood.kind}{known or ''}",
        "the densities of its hyperparameters": {name: str(density) for name, density in target.unknown.items()},
        "the prior": joint.prior.kind,
        "the prior's values": tree.fingerprints(joint.prior.facts()),
        "the masks of parameters": tree.fingerprints(joint.tangent.layout.masks),
        "the use of a forward= hook": joint.tangent.custom_forward,
        **{f"the value of {name}": mark for name, mark in joint.tangent.fingerprints().items()},
        "the data": [digest(batch) for batch in target.examples.batches],
        "the start": start if isinstance(start, str) else digest(start),
        "the state of the generator at the start": tree.fingerprints({"": generator.get_state()})[""],
    }
