"""A deep ensemble from scratch: m networks, each from its own random start, by Adam on

    −(1/b) Σ_batch log p(y_n | f(x_n, θ_k)) − (1/N) log p(θ_k)                  k = 1 … m

(Lakshminarayanan, Pritzel & Blundell, NeurIPS 2017). Members are trained at once, as one matrix θ (m, p) under vmap,
where the network lets them; Adam treats each weight by itself, so that is what training them one by one gives. It is
one by one where a training pass changes buffers (batch norm), where members differ in frozen weights, or where the
batched outputs at the start are not those of each member alone. `made` says which it was. Ranks train a share of the
members each; every rank has all of them in the end.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from tqdm.auto import tqdm

from lapwing import data as loading
from lapwing import given, tree
from lapwing.arguments import as_ranks
from lapwing.curvature.accumulate import flat_outputs, flat_targets
from lapwing.distributed import Ranks
from lapwing.ensembles.deep import assembled, check_alike, same_constants
from lapwing.errors import InvalidValue, NotConverged
from lapwing.log_joint import LogJoint, log_joint
from lapwing.shell import Blended, Fitted
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.evaluating import evaluating
from lapwing.tangent.kernels import plain_kernels


@torch.inference_mode(False)
@torch.enable_grad()
def train(
    make: Callable[[], nn.Module],
    data: Any,
    likelihood: Any,
    members: int = 5,
    *,
    steps: int = 1000,
    lr: float = 1e-2,
    prior: Any = None,
    forward: Any = None,
    generator: torch.Generator | None = None,
    progress: bool = False,
    process_group: Any = None,
) -> Fitted | Blended:
    """Train networks that make() gives, each at its own random start, and join them.

    Each of the steps takes one batch of the data, the same for all members, and reads them again when they end; random
    starts, shuffling and dropout follow the generator. prior: as in `lw.laplace`; None is none, which is plain
    maximum likelihood. process_group: "world" or a torch.distributed group, each process of which calls this with the
    same arguments and all the data: it trains a share of the members. What dropout drops is each process's own."""
    ranks = as_ranks(process_group)
    with ranks.sharing_errors("training an ensemble"):
        return _trained(ranks, make, data, likelihood, members, steps, lr, prior, forward, generator, progress)


def _trained(
    ranks: Ranks,
    make: Callable[[], nn.Module],
    data: Any,
    likelihood: Any,
    members: int,
    steps: int,
    lr: float,
    prior: Any,
    forward: Any,
    generator: torch.Generator | None,
    progress: bool,
) -> Fitted | Blended:
    members, steps = given.whole(members, "members", 1), given.whole(steps, "steps", 1)
    if members < ranks.size:
        raise InvalidValue(f"members={members} for {ranks.size} ranks; give a member at least to each")
    seed, lr = ranks.seed(given.generator(generator)), given_rate(lr)
    with _seeded(seed):
        with ranks.sharing_errors("reading the arguments"):
            models = [make() for _ in range(members)]
            _check_apart(models)
            joint = log_joint(models[0], data, likelihood, 1.0 if prior is None else prior, forward=forward)
            tangents = [joint.tangent, *(linearize(model, forward=forward) for model in models[1:])]
            for k, other in enumerate(tangents[1:], 1):
                check_alike(joint.tangent, other, k)
        loss = _Loss(joint, prior is not None)
        ranks.agree(_facts(tangents, joint, steps, lr), "Call with the same make(), data and arguments on every rank")
        batches = _stream(joint, steps, seed, progress and ranks.rank == 0)
        at_once = _together(tangents, loading.first_inputs(joint.batches, joint.tangent.device))
        if ranks.rank:
            torch.manual_seed(seed + ranks.rank)  # what dropout drops, and nothing else from here on
        mine = ranks.share(members)
        own = (_at_once if at_once else _one_by_one)(tangents[mine], loss, batches, lr, mine.start)
        trained = _of_all(ranks, tangents, own)
    how = "at once" if at_once else "one by one"
    rest = joint.likelihood, joint.prior if prior is not None else None, joint.n, joint.targets
    return assembled(trained, *rest, f"training {members} members {how}")


class _Loss:
    """−(mean log-likelihood of a batch) − log p(θ)/N, of outputs and {parameter: tensor}."""

    def __init__(self, joint: LogJoint, prior: bool) -> None:
        self.joint, self.prior = joint, prior

    def __call__(self, weights: Mapping[str, Tensor], f: Tensor, y: Tensor) -> Tensor:
        likelihood = self.joint.likelihood
        fit = likelihood.log_prob(flat_outputs(f).double(), flat_targets(likelihood, f, y)).sum() / len(y)
        return -fit - self.joint.prior.log_prob(weights) / self.joint.n if self.prior else -fit


def _at_once(
    tangents: Sequence[TangentModel], loss: _Loss, batches: Iterator[Any], lr: float, number: int
) -> list[TangentModel]:
    """Members from this number on, trained."""
    first, layout = tangents[0], tangents[0].layout
    theta = torch.stack([t.theta for t in tangents]).requires_grad_()  # (m, p)
    adam = torch.optim.Adam([theta], lr=lr)

    def one(w: Tensor, x: Any, y: Tensor) -> Tensor:
        return loss(layout.unflatten(w), first.apply(layout.unflatten(w), x), y)

    with _training(first.model), plain_kernels():
        for t, (x, y) in enumerate(batches):
            _descend(adam, vmap(one, (0, None, None), randomness="different")(theta, x, y), t, number)
    return [_moved(tangent, w) for tangent, w in zip(tangents, theta.detach(), strict=True)]


def _one_by_one(
    tangents: Sequence[TangentModel], loss: _Loss, batches: Iterator[Any], lr: float, number: int
) -> list[TangentModel]:
    """Members from this number on, trained."""
    models = [t.model for t in tangents]
    weights = [{n: p for n, p in m.named_parameters() if n in tangents[0].layout.shapes} for m in models]
    adam = torch.optim.Adam([p for named in weights for p in named.values()], lr=lr)
    for t, (x, y) in enumerate(batches):
        losses = []
        for tangent, named in zip(tangents, weights, strict=True):
            with _training(tangent.model):
                losses.append(loss(named, tangent.forward(tangent.model, x), y))
        _descend(adam, torch.stack(losses), t, number)
    return [linearize(t.model, forward=t.forward) for t in tangents]


def _descend(adam: torch.optim.Optimizer, losses: Tensor, t: int, number: int) -> None:
    """One step on the losses of members from this number on, (m,)."""
    lost = [number + k for k in (~torch.isfinite(losses.detach())).nonzero().flatten().tolist()]
    if lost:
        raise NotConverged(f"the loss of members {lost} is no number at step {t}: training diverged; give lr= smaller")
    adam.zero_grad()
    losses.sum().backward()
    adam.step()


def _of_all(ranks: Ranks, tangents: Sequence[TangentModel], own: Sequence[TangentModel]) -> Sequence[TangentModel]:
    """The trained members of all ranks, on each of them."""
    if ranks.alone:
        return own
    found = ranks.joined([(t.theta, t.constants) for t in own], "the members of an ensemble")
    for tangent, (_, constants) in zip(tangents, found, strict=True):
        with torch.no_grad():
            for name, b in tangent.model.named_buffers():
                b.copy_(constants[name])
    return [_moved(tangent, theta) for tangent, (theta, _) in zip(tangents, found, strict=True)]


def _facts(tangents: Sequence[TangentModel], joint: LogJoint, steps: int, lr: float) -> dict[str, str]:
    """What must be the same on every rank, in words."""
    starts = {f"the start of member {k}": t.theta for k, t in enumerate(tangents)}
    return {
        "steps and lr": f"{steps}, {lr}",
        "the data": f"{joint.n} examples, targets {joint.targets}",
        "the likelihood": f"{joint.likelihood.kind}",
        "the prior": joint.prior.kind,
        **tree.fingerprints({**starts, **joint.prior.facts()}),
    }


def _moved(tangent: TangentModel, theta: Tensor) -> TangentModel:
    """The network at trained weights, which its module is given too."""
    own = tangent.embed(tangent.layout.unflatten(theta))
    with torch.no_grad():
        for name, p in tangent.model.named_parameters():
            if name in own:
                p.copy_(own[name])
    return linearize(tangent.model, forward=tangent.forward)


def _together(tangents: Sequence[TangentModel], x: Any) -> bool:
    """Whether one vmapped run is that of every member, in training too."""
    first, layout = tangents[0], tangents[0].layout
    if not all(same_constants(first, other) for other in tangents[1:]) or _moves_buffers(first, x):
        return False
    theta = torch.stack([t.theta for t in tangents])
    run = lambda w: first.apply(layout.unflatten(w), x)  # noqa: E731
    with evaluating(first.model), plain_kernels(), torch.no_grad():
        try:
            found = vmap(run, randomness="different")(theta)
        except (RuntimeError, ValueError, NotImplementedError):  # no batching rule; members are run one by one
            return False
        alone = torch.stack([run(w) for w in theta])
    return bool((found - alone).abs().max() <= 1e3 * first.eps * alone.abs().max())


def _moves_buffers(tangent: TangentModel, x: Any) -> bool:
    model = copy.deepcopy(tangent.model).train()
    with torch.no_grad():
        tangent.forward(model, x)
    return any(not torch.equal(b, tangent.constants[name]) for name, b in model.named_buffers())


def _stream(joint: LogJoint, steps: int, seed: int, progress: bool) -> Iterator[tuple[Any, Tensor]]:
    """Batches, pass after pass, in another random order each where they are shuffled."""
    with tqdm(total=steps, desc="training", disable=not progress, leave=False) as bar:
        done, epoch = 0, 0
        while done < steps:
            for batch in loading.passes(joint.batches, joint.tangent.device, seed=(seed + epoch) % 2**32):
                yield batch
                bar.update()
                done += 1
                if done == steps:
                    return
            epoch += 1


def _check_apart(models: Sequence[nn.Module]) -> None:
    for model in models:
        if not isinstance(model, nn.Module):
            raise InvalidValue(f"make() must give a new torch.nn.Module each time, got {type(model).__name__}")
    pointers = [p.data_ptr() for model in models for p in {id(p): p for p in model.parameters()}.values() if p.numel()]
    if len(set(pointers)) != len(pointers):
        raise InvalidValue("make() gave the same parameters twice; build a new network in it, as in lambda: Net()")


@contextmanager
def _training(model: nn.Module) -> Iterator[None]:
    """The model in training mode; each module's own mode given back."""
    modes = [(m, m.training) for m in model.modules()]
    model.train()
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    """A global random state of our own, since torch.nn starts and drops by that; the user's is given back."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        yield


def given_rate(lr: Any) -> float:
    """A learning rate."""
    rate = given.real(lr, "lr")
    if rate.ndim or not 0 < float(rate) < float("inf"):
        raise InvalidValue(f"lr must be a positive number, got {lr!r}")
    return float(rate)
