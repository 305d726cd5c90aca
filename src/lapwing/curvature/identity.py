"""What a fit is of, so that a stopped one goes on from nothing else: in words, and by digests of its batches."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lapwing import tree

if TYPE_CHECKING:
    from lapwing.curvature.accumulate import Pass
    from lapwing.curvature.state import State


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
