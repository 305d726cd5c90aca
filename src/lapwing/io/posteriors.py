"""Posteriors of other kinds in a file: what they hold, with the network's names, shapes and fingerprints. A mixture
holds what its members' files would, under `member.k.`, and the weights of their networks."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lapwing.errors import BrokenFile, InvalidValue
from lapwing.io.laplace import SCHEMA, pack_layout, take_layout, take_strings
from lapwing.likelihoods import Likelihood
from lapwing.packing import Entries, Tensors, pack_object, sound, unpack_object
from lapwing.priors import Prior
from lapwing.tangent import TangentModel
from lapwing.tree import Layout

Content: TypeAlias = tuple[dict[str, Tensor], dict[str, Any]]  # tensors and a header


@dataclass(frozen=True, eq=False)
class SavedFit:
    """What a file holds of a posterior, without its network."""

    layout: Layout
    fingerprints: dict[str, str]
    likelihood: Likelihood
    prior: Prior | None  # not bound yet
    posterior: Any  # its specification
    held: Tensors
    n: int
    targets: int | None
    made: str
    forward_hook: bool

    def attached(self, tangent: TangentModel) -> Any:
        """The posterior, at the network that it was found for."""
        found = unpack_object(self.posterior, "posterior", self.held, bound={"tangent": tangent})
        self.held.done()
        return found


def pack_fitted(fit: Any, path: Any) -> Content:
    """A posterior with its likelihood and prior, once it is seen that they could be read again."""
    tangent = fit.tangent
    tensors, layout = pack_layout(tangent.layout)
    header = {
        "schema": SCHEMA,
        "kind": "fitted",
        "posterior": pack_object(fit.posterior, "posterior", "posterior.", tensors),
        "likelihood": pack_object(fit.likelihood, "likelihood", "likelihood.", tensors),
        "prior": None if fit.prior is None else pack_object(fit.prior, "prior", "prior.", tensors),
        **layout,
        "fingerprints": tangent.fingerprints(),
        "forward_hook": tangent.custom_forward,
        "n": fit.n,
        "targets": fit.targets,
        "made": fit.made,
    }
    try:
        checked_fit(tensors, json.loads(json.dumps(header)), path).attached(tangent)
    except (BrokenFile, TypeError) as error:
        raise InvalidValue(f"cannot save to {path}, as it could not be loaded: {error}") from error
    return tensors, header


def checked_fit(tensors: dict[str, Tensor], header: dict[str, Any], path: Any) -> SavedFit:
    """What such a file holds, once it is seen to belong together."""
    entries, held = Entries(header), Tensors(tensors, path)
    entries.take("schema", "int")
    entries.take("kind", "str")
    layout = take_layout(entries, held)
    likelihood = unpack_object(entries.take("likelihood", "dict"), "likelihood", held)
    packed = entries.take("prior", "dict | None")
    prior = None if packed is None else unpack_object(packed, "prior", held)
    if prior is not None:
        with sound("its prior"):
            prior.bind(layout)
    posterior, fingerprints = entries.take("posterior", "dict"), take_strings(entries, "fingerprints")
    n, targets = entries.take("n", "int", 0, 2**63), entries.take("targets", "int | None", 0, 2**64 - 1)
    made, hook = entries.take("made", "str"), entries.take("forward_hook", "bool")
    entries.done()
    return SavedFit(layout, fingerprints, likelihood, prior, posterior, held, n, targets, made, hook)


def pack_blended(blended: Any, path: Any) -> Content:
    """A mixture: its members' files as one."""
    tensors, headers = {"log_weight": blended.log_weight}, []
    for k, one in enumerate(blended.members):
        mine, header = one.packed(path)
        tensors |= {f"member.{k}.{name}": value for name, value in mine.items()}
        network = {**one.tangent.constants, **one.tangent.embed(one.tangent.params)}
        tensors |= {f"network.{k}.{name}": value for name, value in network.items()}
        headers.append(header)
    return tensors, {"schema": SCHEMA, "kind": "mixture", "members": headers}


def members_of(
    tensors: dict[str, Tensor], header: dict[str, Any], path: Any
) -> tuple[Tensor, list[tuple[dict[str, Tensor], Content]]]:
    """The log-weights of a mixture, and of each member its network's tensors and its own content."""
    entries, held = Entries(header), Tensors(tensors, path)
    entries.take("schema", "int")
    entries.take("kind", "str")
    headers = entries.take("members", "list")
    entries.done()
    if not headers or not all(type(one) is dict for one in headers):
        raise BrokenFile(f"it is a mixture of {len(headers)} members")
    log_weight = held.take("log_weight", (len(headers),), torch.float64)
    if not abs(float(log_weight.exp().sum()) - 1) < 1e-9:
        raise BrokenFile(f"its weights sum to {float(log_weight.exp().sum()):.6g}")
    found = []
    for k, one in enumerate(headers):
        network = {name: held.take(f"network.{k}.{name}") for name in held.under(f"network.{k}.")}
        own = {name: held.take(f"member.{k}.{name}") for name in held.under(f"member.{k}.")}
        found.append((network, (own, one)))
    held.done()
    return log_weight, found
