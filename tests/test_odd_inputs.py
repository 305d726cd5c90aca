"""Inputs and networks that are not one tensor in, one tensor out: trees, Hugging Face batches, graphs, padding, empty
sequences, mixed and half precision, shared modules, parameters without effect.

Each is held against dense autograd: J of every batch by reverse mode, one output at a time, H = Σ JᵀΛJ.
"""

from __future__ import annotations

import math
import warnings
from collections import OrderedDict, UserDict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close

import lapwing as lw
from helpers import draw as normal
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.operators import linalg

Oracle = Callable[..., Tensor]
STRUCTURES = {
    "primal": lw.curvature.Full("primal"),
    "dual": lw.curvature.Full("dual"),
    "block": lw.curvature.Block(),
    "kron": lw.curvature.Kronecker(),
    "diag": lw.curvature.Diagonal(),
}
NOISE, PRIOR = 0.6, 1.7


def same(
    jacobian: Oracle,
    model: nn.Module,
    batches: list[tuple[Any, Tensor]],
    new: Any,
    run: Callable[[nn.Module, Any], Tensor],
    likelihood: str = "gaussian",
    data: Any = None,
    forward: Any = None,
    predict_at: Any = None,
    slow: bool = False,
) -> dict[str, lw.Laplace]:
    """Every structure on this problem: posterior, evidence and predictive are the dense ones (kron: exact where its
    coverage says so, and consistent with its own dense matrix). `run` is how the oracle calls the model."""
    model.eval()
    H, fit = torch.zeros(()), torch.zeros(())
    for x, y in batches:
        J = jacobian(model, lambda m, x=x: run(m, x))
        f = run(model, x).detach()
        f = f.reshape(-1, f.shape[-1])
        J = J.reshape(*f.shape, -1)
        if likelihood == "gaussian":
            Lambda = torch.eye(f.shape[-1], dtype=torch.float64).expand(len(f), -1, -1) / NOISE**2
            fit = fit - 0.5 * (((y.reshape(f.shape) - f) / NOISE).square() + math.log(2 * math.pi * NOISE**2)).sum()
        else:
            p = f.softmax(-1)
            Lambda = torch.diag_embed(p) - p[..., None] * p[..., None, :]
            fit = fit + f.log_softmax(-1).gather(1, y.reshape(-1, 1)).sum()
        H = H + torch.einsum("nca,ncd,ndb->ab", J, Lambda, J)
    theta = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    eye = torch.eye(len(theta), dtype=torch.float64)
    J = jacobian(model, lambda m: run(m, new))
    given = lw.likelihoods.Gaussian(NOISE) if likelihood == "gaussian" else lw.likelihoods.Categorical()
    found = {}
    for name, structure in STRUCTURES.items():
        with warnings.catch_warnings():
            if slow:
                warnings.simplefilter("ignore", LapwingWarning)  # rows one example at a time
            la = lw.laplace(model, data or batches, given, structure=structure, prior=PRIOR, forward=forward)
            prediction = la.predict(new if predict_at is None else predict_at)
            P = (
                linalg.solve(la.posterior.precision, eye).inverse()
                if name == "dual"
                else linalg.to_dense(la.posterior.precision)
            )
        G = P - PRIOR * eye
        if name in ("primal", "dual"):
            assert_close(G, H, rtol=1e-7, atol=1e-8)
        elif name == "diag":
            assert_close(G, H.diagonal().diag(), rtol=1e-8, atol=1e-9)
        elif name == "block":
            inside = G != 0
            assert_close(G, H * inside, rtol=1e-8, atol=1e-9)
            assert bool((inside | (H.diagonal().diag() == 0)).diagonal().all())
        else:
            exact = [n for n, how in la.coverage.items() if how.startswith("exact block")]
            for n in exact:
                s = la.state.layout.slices()[n]
                assert_close(G[s, s], H[s, s], rtol=1e-8, atol=1e-9)
        evidence = fit - 0.5 * PRIOR * theta.square().sum() - 0.5 * (P.logdet() - len(theta) * math.log(PRIOR))
        assert_close(la.log_evidence(), evidence, rtol=1e-8, atol=1e-7)
        assert_close(prediction.covariance, J @ P.inverse() @ J.mT, rtol=1e-7, atol=1e-9)
        found[name] = la
    return found


# -- trees -----------------------------------------------------------------------------------------------------------


class Two(nn.Module):
    """Two tensors of unequal dtype, a flag, a name and maybe nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.table, self.head = nn.Linear(3, 4), nn.Embedding(6, 4), nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor, power: int = 1, extra: Tensor | None = None, how: str = "sum") -> Tensor:
        h = self.left(a) + self.table(b.long()) ** power
        h = h if extra is None else h * extra
        return self.head(torch.tanh(h) if how == "sum" else h.sin())


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class Encoding(UserDict):
    """A mapping that is no dict, as Hugging Face's BatchEncoding."""


TREES: dict[str, Callable[[Tensor, Tensor, Tensor], Any]] = {
    "tuple": lambda a, b, e: (a, b),
    "list": lambda a, b, e: [a, b],
    "dict": lambda a, b, e: {"a": a, "b": b},
    "ordered": lambda a, b, e: OrderedDict(b=b, a=a),
    "mapping": lambda a, b, e: Encoding({"a": a, "b": b}),
    "named": lambda a, b, e: Pair(a, b),
    "numbers": lambda a, b, e: (a, b, 2),
    "nothing": lambda a, b, e: {"a": a, "b": b, "extra": None},
    "strings": lambda a, b, e: {"a": a, "b": b, "how": "product"},
    "all": lambda a, b, e: {"extra": e, "how": "product", "power": 2, "a": a, "b": b},
}


@pytest.mark.parametrize("kind", TREES)
def test_inputs_are_any_tree(jacobian: Oracle, kind: str) -> None:
    model, tree = Two().double(), TREES[kind]

    def run(m: nn.Module, x: Any) -> Tensor:
        return m(**x) if isinstance(x, (dict, UserDict)) else m(*x)

    def inputs(n: int) -> Any:
        return tree(normal(n, 3), torch.randint(6, (n,)).to(torch.int16), normal(n, 4))

    batches = [(inputs(n), normal(n, 2)) for n in (5, 5, 2)]  # the last is smaller
    found = same(jacobian, model, batches, inputs(3), run)
    assert found["kron"].coverage["left.weight"] == "Kronecker (Linear rule)"  # cut into examples, and proved


def test_one_example_batches_and_a_batch_after_them(jacobian: Oracle) -> None:
    model = Two().double()
    batches = [((normal(n, 3), torch.randint(6, (n,))), normal(n, 2)) for n in (1, 1, 4)]
    same(jacobian, model, batches, batches[2][0], lambda m, x: m(*x))


def test_a_list_of_strings_is_run_whole(jacobian: Oracle) -> None:
    """No tensor among the inputs at all: the targets say how many examples there are."""

    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head = nn.Embedding(128, 3), nn.Linear(3, 2)

        def forward(self, words: list[str]) -> Tensor:
            rows = [self.table(torch.tensor([ord(c) for c in word])).mean(0) for word in words]
            return self.head(torch.stack(rows).tanh())

    def run(m: nn.Module, x: Any) -> Tensor:
        return m(x)

    batches = [(["ab", "abc", "d"], normal(3, 2)), (["e"], normal(1, 2))]
    model = Words().double()
    same(jacobian, model, batches, ["ba", "f"], run, forward=run, slow=True)


def test_a_list_beside_whole_tensors_is_not_cut_in_silence() -> None:
    n = 300
    inputs = {"x": torch.randn(n, 2), "words": ["a"] * n}
    with pytest.raises(InvalidValue, match="list of 300 values that are no tensors"):
        lw.laplace(nn.Linear(2, 1), (inputs, torch.randn(n, 1)), "gaussian", forward=lambda m, x: m(x["x"]))


# -- Hugging Face ----------------------------------------------------------------------------------------------------


class Output(OrderedDict):
    """What a transformers model returns: a mapping whose attributes are its entries."""


class Encoder(nn.Module):
    """input_ids and attention_mask (n, t) -> {"logits": (n, 3)}, with a loss if given labels."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body, self.head = nn.Embedding(9, 4), nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, labels: Tensor | None = None) -> Output:
        assert labels is None, "the model saw the targets"
        keep = attention_mask.unsqueeze(-1).to(self.head.weight)
        h = torch.tanh(self.body(self.table(input_ids))) * keep
        return Output(logits=self.head(h.sum(1) / keep.sum(1).clamp(min=1)), hidden_states=h)


def tokens(n: int, t: int, empty: bool = False) -> dict[str, Tensor]:
    lengths = torch.randint(1, t + 1, (n,))
    if empty:
        lengths[0] = 0  # padding all along
    return {"input_ids": torch.randint(9, (n, t)), "attention_mask": (torch.arange(t) < lengths[:, None]).long()}


@pytest.mark.parametrize("kind", [dict, Encoding])
def test_hugging_face_batches(jacobian: Oracle, kind: Any) -> None:
    model = Encoder().double()

    def run(m: nn.Module, x: Any) -> Tensor:
        return m(**x)["logits"]

    batches = [(tokens(n, t, empty=True), torch.randint(3, (n,))) for n, t in ((5, 4), (4, 6), (2, 3))]
    data = [kind({**x, "labels": y}) for x, y in batches]
    new = tokens(3, 5)
    with_labels = kind({**new, "labels": torch.zeros(3, dtype=torch.long)})
    found = same(jacobian, model, batches, new, run, "categorical", data=data, predict_at=with_labels)
    bare = found["kron"].predict(kind(new))
    assert torch.equal(bare.covariance, found["kron"].predict(with_labels).covariance)


def test_padding_does_not_matter(jacobian: Oracle) -> None:
    """More padding, with any token under it, is the same network function: same evidence, same error bars."""
    model, x, y = Encoder().double(), tokens(6, 4), torch.randint(3, (6,))
    more = {
        "input_ids": torch.cat([x["input_ids"], torch.randint(9, (6, 3))], 1),
        "attention_mask": torch.cat([x["attention_mask"], torch.zeros(6, 3, dtype=torch.long)], 1),
    }
    for name in ("primal", "dual", "block", "diag"):
        a, b = (lw.laplace(model, [(z, y)], "categorical", structure=STRUCTURES[name]) for z in (x, more))
        assert_close(a.log_evidence(), b.log_evidence(), rtol=1e-10, atol=1e-10)
        assert_close(a.predict(x).covariance, b.predict(more).covariance, rtol=1e-9, atol=1e-12)


@pytest.mark.usefixtures("hasty_doctor")
def test_the_last_layer_and_the_doctor_take_hugging_face_batches() -> None:
    model = Encoder()
    data = [Encoding({**tokens(6, 4), "labels": torch.randint(3, (6,))}) for _ in range(3)]
    assert lw.laplace(model, data, "categorical", subset="last_layer").state.layout.names == (
        "head.weight",
        "head.bias",
    )
    report = lw.doctor(model, data, "categorical")
    assert not [f for f in report.findings if f.severity == "error"], str(report)
    assert report.recommendation


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.make = nn.Linear(3, 2), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x))


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda f: {"scores": f}, "dict"),
        (lambda f: (f, f), "tuple"),
        (lambda f: Pair(f, f), "Pair"),
        (lambda f: {"logits": (f, f)}, "tuple"),
        (lambda f: None, "NoneType"),
    ],
)
@pytest.mark.parametrize("structure", STRUCTURES)
def test_other_outputs_are_refused(make: Any, says: str, structure: str) -> None:
    data = torch.randn(4, 3), torch.randn(4, 2)
    with pytest.raises(InvalidValue, match=rf"returns {says}, not a tensor.*forward="):
        lw.laplace(Returns(make), data, "gaussian", structure=STRUCTURES[structure])


# -- graphs ----------------------------------------------------------------------------------------------------------


class GraphNet(nn.Module):
    """h_i = tanh(W x_i + V Σ_{j→i} x_j), twice; edges (2, e)."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.others = nn.Linear(3, 4), nn.Linear(3, 4, bias=False)
        self.own2, self.others2 = nn.Linear(4, 2), nn.Linear(4, 2, bias=False)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for own, others in ((self.own, self.others), (self.own2, self.others2)):
            total = x.new_zeros(x.shape).index_add(0, edges[1], x[edges[0]])
            z = own(x) + others(total)
            x = torch.tanh(z) if own is self.own else z
        return x


def ring(n: int) -> Tensor:
    i = torch.arange(n)
    return torch.stack([i, (i + 1) % n])


def chain(n: int) -> Tensor:
    i = torch.arange(n - 1)
    return torch.stack([i, i + 1])


def on_graph(m: nn.Module, g: Any) -> Tensor:
    return m(*g)


@pytest.mark.parametrize("make", [ring, chain])
def test_nodes_of_graphs_are_classified(jacobian: Oracle, make: Callable[[int], Tensor]) -> None:
    """One batch is one graph; its outputs are its nodes'."""
    model = GraphNet().double()
    batches = [((normal(n, 3), make(n)), torch.randint(2, (n,))) for n in (7, 5)]
    same(jacobian, model, batches, (normal(4, 3), make(4)), on_graph, "categorical", slow=True)


@pytest.mark.parametrize("n", [6, 12])
@pytest.mark.parametrize("make", [ring, chain])
def test_edges_that_look_like_examples_are_not_cut(jacobian: Oracle, make: Callable[[int], Tensor], n: int) -> None:
    """As many edges as nodes, edges (e, 2): first dimensions agree, and yet rows are no examples. In the chain, no
    node depends on a later one."""

    def forward(m: nn.Module, g: Any) -> Tensor:
        return m(g[0], g[1].T)

    edges = make(n).T
    edges = torch.cat([torch.zeros(1, 2, dtype=torch.long), edges])[:n]  # the first into node 0, the i-th from i − 1
    model = GraphNet().double()
    batches = [((normal(n, 3), edges), normal(n, 2))]
    same(jacobian, model, batches, (normal(n, 3), edges), forward, forward=forward, slow=True)


def test_a_graph_without_edges_first(jacobian: Oracle) -> None:
    """The first batch shows no mixing of nodes, the second does: full rows come from autograd then, and structures
    that chose their treatment on the first batch refuse. The other way round all is right."""
    model = GraphNet().double()
    batches = [((normal(n, 3), e), normal(n, 2)) for n, e in ((4, torch.zeros(2, 0, dtype=torch.long)), (6, ring(6)))]
    J = torch.cat([jacobian(model, lambda m, x=x: on_graph(m, x)) for x, _ in batches])
    H = torch.einsum("nca,ncb->ab", J, J)
    for name, structure in STRUCTURES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LapwingWarning)
            if name in ("primal", "dual"):
                la = lw.laplace(model, batches, "gaussian", structure=structure)
                eye = torch.eye(len(H), dtype=torch.float64)
                assert_close(linalg.solve(la.posterior.precision, eye), (H + eye).inverse(), rtol=1e-8, atol=1e-10)
            else:
                with pytest.raises(InvalidValue, match="mixes them now"):
                    lw.laplace(model, batches, "gaussian", structure=structure)
    same(jacobian, model, batches[::-1], (normal(5, 3), ring(5)), on_graph, slow=True)


def test_some_nodes_are_labelled(jacobian: Oracle) -> None:
    """The usual semi-supervised setting: the hook picks the nodes that have targets, or those to predict at."""
    model, n = GraphNet().double(), 9

    def forward(m: nn.Module, g: Any) -> Tensor:
        return m(g["x"], g["edges"])[g["nodes"]]

    graph = {"x": normal(n, 3), "edges": ring(n)}
    batches = [({**graph, "nodes": torch.tensor([0, 3, 4, 8])}, torch.randint(2, (4,)))]
    new = {**graph, "nodes": torch.tensor([1, 2])}
    same(jacobian, model, batches, new, forward, "categorical", forward=forward, slow=True)


@pytest.mark.parametrize("sizes", [((3, 4, 2), (3, 3)), ((3, 3, 3), (2, 4)), ((3, 3), (2, 5))])
def test_graphs_are_classified(jacobian: Oracle, sizes: tuple[tuple[int, ...], ...]) -> None:
    """A batch of graphs: nodes, edges, and the graph that each node belongs to; outputs (graphs, 2). Graphs of equal
    size in the first batch must not make nodes look like positions of an example."""
    model = GraphNet().double()

    def together(sizes: tuple[int, ...]) -> dict[str, Tensor]:
        shift = torch.tensor([0, *sizes]).cumsum(0)
        edges = torch.cat([ring(n) + s for n, s in zip(sizes, shift, strict=False)], 1)
        index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
        return {"x": normal(sum(sizes), 3), "edges": edges, "batch": index}

    def forward(m: nn.Module, g: Any) -> Tensor:
        nodes = m(g["x"], g["edges"])
        return nodes.new_zeros(int(g["batch"].max()) + 1, 2).index_add(0, g["batch"], nodes)

    batches = [(together(s), torch.randint(2, (len(s),))) for s in sizes]
    same(jacobian, model, batches, together((2, 5)), forward, "categorical", forward=forward, slow=True)


@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("n", [5, 11])
def test_an_adjacency_matrix(jacobian: Oracle, n: int, sparse: bool) -> None:
    net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()

    def forward(m: nn.Module, g: Any) -> Tensor:
        a, x = g
        return a @ m[2](m[1](a @ m[0](x)))  # type: ignore[index]

    def graph() -> Any:
        a = torch.rand(n, n, dtype=torch.float64) * (torch.rand(n, n) < 0.5)
        return (a.to_sparse() if sparse else a), normal(n, 3)

    same(jacobian, net, [(graph(), normal(n, 2)) for _ in range(2)], graph(), forward, forward=forward, slow=True)


def test_a_graph_as_a_pair_says_how_to_give_it() -> None:
    with pytest.raises(InvalidValue, match=r"a graph.*list: \[\(inputs, targets\), ...\]"):
        lw.laplace(GraphNet(), ((torch.randn(5, 3), ring(5)), torch.randint(2, (5,))), "categorical")


@pytest.mark.usefixtures("hasty_doctor")
def test_the_doctor_and_files_take_graphs(tmp_path: Path) -> None:
    model = GraphNet()
    data = [((torch.randn(n, 3), ring(n)), torch.randint(2, (n,))) for n in (7, 5)]
    report = lw.doctor(model, data, "categorical")
    assert not [f for f in report.findings if f.severity == "error"], str(report)
    for name, structure in STRUCTURES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LapwingWarning)
            la = lw.laplace(model, data, "categorical", structure=structure)
            la.save(tmp_path / name)
            again = lw.load(tmp_path / name, model)
            assert torch.equal(again.predict(data[0][0]).covariance, la.predict(data[0][0]).covariance)


# -- empty sequences -------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x)).sum(1))


@pytest.mark.parametrize("lengths", [(3, 0, 5), (0, 3, 2), (0, 0)])
def test_sequences_of_length_zero(jacobian: Oracle, lengths: tuple[int, ...]) -> None:
    model = Pooled().double()
    batches = [(normal(4, t, 3), normal(4, 2)) for t in lengths]
    for new in (normal(3, 2, 3), normal(3, 0, 3)):
        same(jacobian, model, batches, new, lambda m, x: m(x), slow=True)


def test_a_mean_over_nothing_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh())
    with pytest.raises(InvalidValue, match="outputs hold NaN"):
        lw.laplace(model, [(torch.randn(4, 0, 3), torch.randn(4, 4))], "gaussian", forward=lambda m, x: m(x).mean(1))


# -- dtypes ----------------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A body in one dtype, a head in another."""

    def __init__(self, body: torch.dtype, head: torch.dtype) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(3, 4).to(body), nn.Linear(4, 2).to(head)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.body(x.to(self.body.weight))).to(self.head.weight))


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float64),
        (torch.float64, torch.float32),
        (torch.bfloat16, torch.float32),
        (torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.float16),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_mixed_dtypes_are_right_within_the_coarser(dtypes: tuple[torch.dtype, ...], masked: bool) -> None:
    """Against the float64 network at the same weights; draws come in each parameter's own dtype."""
    model, x, y = Mixed(*dtypes), torch.randn(9, 3), torch.randn(9, 2)
    twin = Mixed(torch.float64, torch.float64)
    twin.load_state_dict(model.state_dict())
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    subset = {"body.weight": torch.rand(4, 3) < 0.5, "head.weight": torch.ones(2, 4).bool()} if masked else "all"
    for name, structure in STRUCTURES.items():
        la = lw.laplace(model, (x, y.to(dtypes[1])), "gaussian", structure=structure, subset=subset)
        want = lw.laplace(twin, (x, y.to(dtypes[1]).double()), "gaussian", structure=structure, subset=subset)
        assert la.log_evidence().dtype == torch.float64
        assert_close(la.log_evidence(), want.log_evidence(), rtol=8 * eps, atol=0.0)
        exact = want.predict(x).covariance
        assert_close(
            la.predict(x).covariance.double(), exact, rtol=16 * eps, atol=4 * eps * float(exact.max()), msg=name
        )
        drawn = la.draw(2)
        assert all(drawn[n].dtype == model.get_parameter(n).dtype for n in drawn)
        assert bool(torch.isfinite(la.predict(x, via="network").f_var).all())
    tangent, exact_tangent = lw.linearize(model, subset), lw.linearize(twin, subset)
    v = torch.randn(3, tangent.layout.size)
    (_, got), (_, right) = tangent.jvps(x, v), exact_tangent.jvps(x, v.double())
    assert_close(got.double(), right, rtol=16 * eps, atol=16 * eps * float(right.abs().max()))
    one = tangent.jvp(x, tangent.layout.unflatten(v[0]))
    assert_close(one.double(), right[0], rtol=16 * eps, atol=16 * eps * float(right.abs().max()))


# -- shared and idle parameters --------------------------------------------------------------------------------------


class Shared(nn.Module):
    """One module under two names and called twice; one never called; a parameter that no output depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(3, 3)
        self.again = self.body
        self.head, self.idle = nn.Linear(3, 2), nn.Linear(2, 2)
        self.spare = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.again(torch.tanh(self.body(x))))) + 0 * self.spare.detach()


def test_shared_modules_and_idle_parameters(jacobian: Oracle) -> None:
    model = Shared().double()
    batches = [(normal(n, 3), normal(n, 2)) for n in (5, 2)]
    found = same(jacobian, model, batches, normal(3, 3), lambda m, x: m(x))
    for name in ("block", "kron", "diag"):
        coverage = found[name].coverage
        assert {n for n, how in coverage.items() if how == "prior only: no output depends on it"} == {
            "idle.weight",
            "idle.bias",
            "spare",
        }
        assert "generic" in coverage["body.weight"]
        assert not [n for n in coverage if n.startswith("again")]
    variance = found["diag"].posterior.precision
    assert_close(
        linalg.diagonal(variance)[-8:-6].new_full((2,), PRIOR), linalg.diagonal(variance)[:2]
    )  # spare is first
