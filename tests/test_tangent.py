"""The tangent model against reverse mode, one output at a time (the `jacobian` fixture), on every kind of input,
output and kernel; and the network that it borrows, left exactly as it was found."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from helpers import close
from lapwing.curvature.rows import StreamedRows
from lapwing.errors import InvalidValue, LapwingWarning
from lapwing.tangent import TangentModel, linearize
from lapwing.tangent.calling import swapped
from lapwing.tangent.kernels import composed_embedding_bag, plain_kernels

Oracle = Callable[..., Tensor]


def direction(tangent: TangentModel, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(p.shape, generator=generator, dtype=p.dtype) for n, p in tangent.params.items()}


def flat(tree: dict[str, Tensor]) -> Tensor:
    return torch.cat([t.reshape(-1) for t in tree.values()])


@pytest.fixture(params=["mlp", "cnn", "tokens"])
def network(request: pytest.FixtureRequest, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """A network and a batch: outputs (n, c) of matrices and images, (n, s, c) of tokens."""
    model = request.getfixturevalue(request.param)
    if request.param == "tokens":
        return model, torch.randint(7, (3, 4), generator=generator)
    if request.param == "cnn":
        return model, request.getfixturevalue("images")
    return model, request.getfixturevalue("regression")[0]


# -- tensors in the place of the network's own -----------------------------------------------------------------------


class Shared(nn.Module):
    """One module under two names, one parameter in two modules, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(3, 3), nn.Linear(3, 3)
        self.again, self.b.weight = self.a, self.a.weight
        self.register_buffer("shift", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.b(self.again(x)) + self.shift


def test_swapped_tensors_stand_in_all_places_and_go_in_the_end() -> None:
    model, x = Shared().double(), torch.randn(2, 3).double()
    own = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    new = {n: torch.randn_like(t) for n, t in [*model.named_parameters(), *model.named_buffers()]}
    want = F.linear(F.linear(x, new["a.weight"], new["a.bias"]), new["a.weight"], new["b.bias"]) + new["shift"]

    def run_and_fail() -> None:
        with swapped(model, new):
            close(model(x), want)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_and_fail()
    after = dict(model.named_parameters(remove_duplicate=False)) | dict(model.named_buffers())
    assert own.keys() == after.keys()
    assert all(after[n] is t for n, t in own.items())
    with pytest.raises(AttributeError, match=r"no c\.weight any more"), swapped(model, {"c.weight": x}):
        pass


# -- the Jacobian, four ways -----------------------------------------------------------------------------------------


def test_the_call_is_the_network(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    close(linearize(model)(x), copy.deepcopy(model).eval()(x))


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_jvp_and_vjp_are_adjoint(network: tuple[nn.Module, Tensor], seed: int) -> None:
    """⟨u, Jv⟩ = ⟨Jᵀu, v⟩."""
    model, x = network
    tangent = linearize(model)
    v = direction(tangent, seed)
    jv = tangent.jvp(x, v)
    u = torch.randn(jv.shape, generator=torch.Generator().manual_seed(seed), dtype=jv.dtype)
    close((u * jv).sum(), flat(tangent.vjp(x, u)) @ flat(v))


def test_rows_jvp_and_vjp_equal_reverse_mode(network: tuple[nn.Module, Tensor], jacobian: Oracle) -> None:
    model, x = network
    tangent = linearize(model)
    expected = jacobian(model, lambda m: m(x))  # (n, ..., c, p)
    v = direction(tangent)
    u = torch.randn(expected.shape[:-1], dtype=torch.float64)
    rows = tangent.rows(x)
    assert rows.shape == expected.shape
    close(rows, expected)
    close(tangent.jvp(x, v), expected @ flat(v))
    close(flat(tangent.vjp(x, u)), u.reshape(-1) @ expected.reshape(u.numel(), -1))


def test_rows_equal_jacrev(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    twin = copy.deepcopy(model).eval()
    params = {n: p.detach() for n, p in twin.named_parameters()}
    blocks = torch.func.jacrev(lambda p: torch.func.functional_call(twin, p, (x,)))(params)
    outputs = twin(x).ndim
    close(linearize(model).rows(x), torch.cat([blocks[n].flatten(outputs) for n in params], -1))


def test_jvp_equals_finite_differences(network: tuple[nn.Module, Tensor]) -> None:
    model, x = network
    tangent, step = linearize(model), 1e-5
    v = direction(tangent)

    def moved(by: float) -> Tensor:
        twin = copy.deepcopy(model).eval()
        with torch.no_grad():
            for n, p in twin.named_parameters():
                p.add_(by * v[n])
            return twin(x)

    close(tangent.jvp(x, v), (moved(step) - moved(-step)) / (2 * step), 1e-7)


def test_pulled_rows_of_some_parameters(network: tuple[nn.Module, Tensor], jacobian: Oracle) -> None:
    """uᵀJ(x_n) for a few cotangents an example, for any choice of parameters in the order of the choice."""
    model, x = network
    tangent = linearize(model)
    full = jacobian(model, lambda m: m(x))
    full = full.reshape(len(x), -1, full.shape[-1])  # (n, outputs, p)
    u = torch.randn(len(x), 2, *tangent(x).shape[1:], dtype=torch.float64)
    expected = u.flatten(2) @ full
    close(tangent.pulled(x, u), expected)
    names = tangent.layout.names[2], tangent.layout.names[0]
    slices = tangent.layout.slices()
    close(tangent.pulled(x, u, names), torch.cat([expected[..., slices[n]] for n in names], -1))


def test_one_example_and_one_output() -> None:
    model = nn.Linear(3, 1).double()
    x = torch.randn(1, 3, dtype=torch.float64)
    close(linearize(model).rows(x), torch.cat([x, torch.ones(1, 1)], 1).reshape(1, 1, 4))


def test_outputs_with_several_positions_axes(jacobian: Oracle) -> None:
    """A pixel-wise network: (n, h, w, c)."""
    model = nn.Conv2d(2, 3, 2).double()
    x = torch.randn(2, 2, 3, 4, dtype=torch.float64)

    def pixels(m: nn.Module, x: Tensor) -> Tensor:
        return m(x).permute(0, 2, 3, 1)

    tangent = linearize(model, forward=pixels)
    assert tangent.rows(x).shape == (2, 2, 3, 3, tangent.layout.size)
    close(tangent.rows(x), jacobian(model, lambda m: pixels(m, x)))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_users_grad_mode_does_not_matter(mode: Any, mlp: nn.Module, regression: tuple[Tensor, Tensor]) -> None:
    x, u = regression
    tangent = linearize(mlp)
    v = direction(tangent)
    expected = tangent.rows(x), tangent.jvp(x, v), flat(tangent.vjp(x, u))
    with mode():
        found = tangent.rows(x), tangent.jvp(x, v), flat(tangent.vjp(x, u))
    for a, b in zip(found, expected, strict=True):
        close(a, b)
        assert not a.requires_grad
    assert not tangent(x).requires_grad


# -- inputs ----------------------------------------------------------------------------------------------------------


class TwoInputs(nn.Module):
    """A net of two inputs, with a flag that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(3, 4), nn.Linear(2, 4, bias=False)
        self.head = nn.Linear(4, 2)

    def forward(self, a: Tensor, b: Tensor, double: bool = False) -> Tensor:
        h = torch.tanh(self.left(a) * self.right(b))
        return self.head(2 * h if double else h)


@pytest.mark.parametrize("kind", ["tuple", "list", "dict", "dict with a flag", "forward hook"])
def test_any_tree_of_inputs(kind: str, jacobian: Oracle) -> None:
    model = TwoInputs().double()
    a, b = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 2, dtype=torch.float64)
    inputs: dict[str, Any] = {
        "tuple": (a, b),
        "list": [a, b],
        "dict": {"b": b, "a": a},
        "dict with a flag": {"a": a, "b": b, "double": True},
        "forward hook": {"features": {"left": a}, "other": [b]},
    }
    x, double = inputs[kind], kind == "dict with a flag"

    def hook(m: nn.Module, x: Any) -> Tensor:
        return m(x["features"]["left"], x["other"][0])

    tangent = linearize(model, forward=hook if kind == "forward hook" else None)
    expected = jacobian(model, lambda m: m(a, b, double))
    v = direction(tangent)
    u = torch.randn(5, 2, dtype=torch.float64)
    close(tangent(x), copy.deepcopy(model)(a, b, double).detach())
    close(tangent.rows(x), expected)
    close(tangent.jvp(x, v), expected @ flat(v))
    close(flat(tangent.vjp(x, u)), u.reshape(-1) @ expected.reshape(10, -1))


def test_a_hook_may_use_the_model_without_calling_it(jacobian: Oracle) -> None:
    model = nn.Linear(3, 2).double()
    x = torch.randn(4, 3, dtype=torch.float64)

    def hook(m: nn.Module, x: Tensor) -> Tensor:
        return torch.sin(x @ m.weight.T) * m.bias

    close(linearize(model, forward=hook).rows(x), jacobian(model, lambda m: hook(m, x)))


def test_a_hook_may_return_outputs_of_a_graph(jacobian: Oracle) -> None:
    """Inputs that cannot be cut into examples (nodes and edges): the same rows, slowly, and said once."""
    model = nn.Linear(3, 2).double()
    graph = {"nodes": torch.randn(4, 3, dtype=torch.float64), "edges": torch.tensor([[0, 1, 2, 3, 0], [1, 2, 3, 0, 2]])}

    def hook(m: nn.Module, x: dict[str, Tensor]) -> Tensor:
        h = torch.tanh(m(x["nodes"]))
        return h.index_add(0, x["edges"][1], h[x["edges"][0]])

    tangent = linearize(model, forward=hook)
    with pytest.warns(LapwingWarning, match="one example at a time"):
        rows = tangent.rows(graph)
    close(rows, jacobian(model, lambda m: hook(m, graph)))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(tangent.rows(graph), rows)


# -- the network, left as it was found -------------------------------------------------------------------------------


def test_batch_norm_and_dropout_are_in_eval_mode(cnn: nn.Module, images: Tensor, jacobian: Oracle) -> None:
    model = nn.Sequential(cnn, nn.Dropout(0.5)).train()
    tangent = linearize(model)
    twin = copy.deepcopy(model).eval()
    close(tangent(images), twin(images).detach())
    close(tangent(images[:1]), twin(images[:1]).detach())  # no statistics of the batch
    close(tangent.rows(images), jacobian(model, lambda m: m(images)))


def record(model: nn.Module) -> dict[str, Any]:
    """Everything about a module that a pass could change."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    tensors = [*model.named_parameters(), *model.named_buffers()]
    return {
        "modes": [m.training for m in model.modules()],
        "hooks": [[dict(getattr(m, kind)) for kind in hooks] for m in model.modules()],
        "ids": [(n, id(t)) for n, t in tensors],
        "values": [t.detach().clone() for _, t in tensors],
        "grads": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "requires_grad": [p.requires_grad for p in model.parameters()],
        "attributes": [sorted(vars(m)) for m in model.modules()],
        "rng": torch.random.get_rng_state(),
    }


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


@pytest.fixture
def used(cnn: nn.Module, images: Tensor) -> nn.Module:
    """A model in the middle of training: modes mixed, a frozen weight, gradients, hooks, dropout."""
    model = nn.Sequential(cnn, nn.Dropout(0.5), nn.Linear(2, 3).double())
    model.train()
    cnn[1].eval()  # type: ignore[index]
    model(images).sum().backward()
    cnn[0].bias.requires_grad_(False)  # type: ignore[index]
    model.register_forward_hook(lambda m, i, o: None)
    model[2].register_forward_pre_hook(lambda m, i: None)
    return model


def test_backward_hooks_of_the_user_do_not_disturb(used: nn.Module, images: Tensor, jacobian: Oracle) -> None:
    expected = jacobian(used, lambda m: m(images))
    expected = torch.cat([expected[..., :36], expected[..., 39:]], -1)  # the frozen bias
    fired: list[nn.Module] = []
    used[2].register_full_backward_hook(lambda m, i, o: fired.append(m))  # type: ignore[index]
    before = record(used)
    tangent = linearize(used)
    v, u = direction(tangent), torch.randn(4, 3, dtype=torch.float64)
    close(tangent.rows(images), expected)
    close(tangent.jvp(images, v), expected @ flat(v))
    close(flat(tangent.vjp(images, u)), u.reshape(-1) @ expected.reshape(12, -1))
    assert not fired
    assert same(before["hooks"], record(used)["hooks"])


@pytest.mark.parametrize("subset", ["all", "last_layer", ["0.*"]])
def test_the_model_is_left_exactly_as_found(used: nn.Module, images: Tensor, subset: Any) -> None:
    before = record(used)
    tangent = linearize(used, subset, example=images)
    tangent(images)
    tangent.rows(images)
    tangent.jvp(images, direction(tangent))
    tangent.vjp(images, torch.ones(4, 3, dtype=torch.float64))
    after = record(used)
    for what in before:
        assert same(before[what], after[what]), what


def test_the_model_is_left_as_found_after_an_error(used: nn.Module, images: Tensor) -> None:
    before = record(used)
    tangent = linearize(used)
    for wrong in (images[:, :1], images.long()):
        for verb in (tangent, lambda x: tangent.jvp(x, direction(tangent)), lambda x: tangent.vjp(x, images)):
            with pytest.raises(RuntimeError):
                verb(wrong)
    with pytest.raises(RuntimeError):
        linearize(used, "last_layer", example=images[:, :1])
    after = record(used)
    for what in before:
        assert same(before[what], after[what]), what


def test_training_on_does_not_move_the_tangent_model(cnn: nn.Module, images: Tensor) -> None:
    tangent = linearize(cnn)
    v = direction(tangent)
    before = tangent(images), tangent.rows(images), tangent.jvp(images, v)
    cnn.train()
    optimizer = torch.optim.SGD(cnn.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        cnn(images).square().sum().backward()
        optimizer.step()
    after = tangent(images), tangent.rows(images), tangent.jvp(images, v)
    assert all(map(torch.equal, before, after))
    assert not torch.equal(linearize(cnn)(images), before[0])  # or this test checks nothing


class Counting(nn.Module):
    """A buffer that each forward pass moves in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.count: Tensor
        self.register_buffer("count", torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.linear(x) * self.count


def test_a_buffer_that_a_pass_moves_stays_where_it_was() -> None:
    model = Counting().double()
    x = torch.randn(4, 3, dtype=torch.float64)
    tangent = linearize(model)
    first = tangent(x)
    close(tangent(x), first)
    close(tangent.rows(x) @ tangent.theta, first)  # linear in its weights
    assert float(model.count) == 1.0


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_weights_that_a_pass_renormalizes_are_refused(kind: Any) -> None:
    model = nn.Sequential(kind(7, 3, max_norm=0.5), nn.Linear(3, 2)).double()
    with pytest.raises(InvalidValue, match="max_norm=None"):
        linearize(model)


# -- shared, frozen and wrapped --------------------------------------------------------------------------------------


class Tied(nn.Module):
    """An embedding that is the output layer too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 6)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.mix(self.embedding(x).mean(1))))


def test_a_tied_parameter_is_one_parameter_with_the_gradient_of_both_uses(jacobian: Oracle) -> None:
    model = Tied().double()
    x = torch.randint(6, (5, 3))
    tangent = linearize(model)
    assert tangent.layout.names == ("embedding.weight", "mix.weight", "mix.bias", "head.bias")
    expected = jacobian(model, lambda m: m(x))
    v = direction(tangent)
    close(tangent.rows(x), expected)
    close(tangent.jvp(x, v), expected @ flat(v))
    moved = {n: p + 0.1 for n, p in tangent.params.items()}
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for p in twin.parameters():
            p += 0.1
    close(tangent.apply(moved, x), twin(x).detach())


def test_a_module_used_twice_has_the_gradient_of_both_uses(jacobian: Oracle) -> None:
    shared = nn.Linear(4, 4)
    model = nn.Sequential(shared, nn.Tanh(), shared, nn.Linear(4, 2)).double()
    x = torch.randn(5, 4, dtype=torch.float64)
    before, expected = record(model), jacobian(model, lambda m: m(x))
    tangent = linearize(model, "last_layer", example=x)
    assert tangent.layout.names == ("3.weight", "3.bias")
    tangent = linearize(model)
    v = direction(tangent)
    close(tangent.rows(x), expected)
    close(tangent.jvp(x, v), expected @ flat(v))
    assert same(before, record(model))  # torch's functional_call swaps a module of two names twice


def test_frozen_parameters_are_constants(mlp: nn.Module, regression: tuple[Tensor, Tensor], jacobian: Oracle) -> None:
    mlp[0].weight.requires_grad_(False)  # type: ignore[index]
    tangent = linearize(mlp)
    assert tangent.layout.names == ("0.bias", "2.weight", "2.bias")
    x = regression[0]
    close(tangent.rows(x), jacobian(mlp, lambda m: m(x))[..., 20:])
    close(tangent(x), copy.deepcopy(mlp)(x).detach())


def test_element_masks_give_columns_of_the_full_jacobian(mlp: nn.Module, regression: tuple[Tensor, Tensor]) -> None:
    x, u = regression
    mask = torch.rand(4, 5) < 0.5
    whole, part = linearize(mlp), linearize(mlp, {"2.bias": torch.tensor([True, False, True]), "0.weight": mask})
    assert part.layout.names == ("0.weight", "2.bias")
    columns = torch.cat([mask.reshape(-1), torch.zeros(4, dtype=torch.bool), torch.zeros(12, dtype=torch.bool)])
    columns = torch.cat([columns, torch.tensor([True, False, True])])
    close(part.theta, whole.theta[columns])
    close(part(x), whole(x))
    close(part.rows(x), whole.rows(x)[..., columns])
    close(flat(part.vjp(x, u)), flat(whole.vjp(x, u))[columns])
    v = direction(part)
    close(part.jvp(x, v), whole.rows(x)[..., columns] @ flat(v))
    embedded = part.embed({"0.weight": torch.full((int(mask.sum()),), 9.0).double(), "2.bias": torch.zeros(2).double()})
    expected = torch.where(mask, 9.0, mlp[0].weight.detach())  # type: ignore[index]
    close(embedded["0.weight"], expected)
    assert embedded["2.bias"].tolist() == [0.0, mlp[2].bias[1].item(), 0.0]  # type: ignore[index]


def test_a_compiled_model_is_unwrapped(mlp: nn.Module, regression: tuple[Tensor, Tensor]) -> None:
    compiled = torch.compile(mlp, backend="eager")
    tangent, plain = linearize(compiled), linearize(mlp)
    assert tangent.layout.names == plain.layout.names
    x = regression[0]
    assert torch.equal(tangent(x), plain(x))
    assert torch.equal(tangent.rows(x), plain.rows(x))


# -- what cannot be linearized ---------------------------------------------------------------------------------------


class Returns(nn.Module):
    def __init__(self, what: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.what = nn.Linear(3, 2), what

    def forward(self, x: Tensor) -> Any:
        return self.what(self.linear(x))


def test_outputs_that_are_no_tensor_of_examples_are_named() -> None:
    x = torch.randn(4, 3)
    for what, text in [
        (lambda f: (f, f), "tuple"),
        (lambda f: {"scores": f}, "dict"),
        (lambda f: f.sum(-1), r"\(4,\)"),
        (lambda f: f.sum(), r"\(\)"),
    ]:
        with pytest.raises(InvalidValue, match=text) as caught:
            linearize(Returns(what))(x)
        assert "forward=" in str(caught.value)


def test_models_that_cannot_be_linearized_are_refused() -> None:
    broken = nn.Linear(2, 2)
    with torch.no_grad():
        broken.weight[0, 1] = torch.inf
    norm = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2, track_running_stats=False))
    cases: list[tuple[Any, str]] = [
        (lambda x: x, "torch.nn.Module"),
        (broken, "weight holds NaN or infinite"),
        (nn.Sequential(nn.LazyLinear(3)), "0.weight is uninitialized"),
        (norm, "1 normalizes by the statistics of each batch"),
        (nn.Tanh(), "no parameters"),
        (nn.Linear(2, 2).requires_grad_(False), "no parameter requires grad"),
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # lazy modules announce themselves
        for model, text in cases:
            with pytest.raises(InvalidValue, match=text):
                linearize(model)


# -- kernels without forward mode ------------------------------------------------------------------------------------


class Recurrent(nn.Module):
    """(n, s, 3) -> (n, s, 2)."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.core = kind(3, 4, batch_first=True, **options)
        self.head = nn.Linear(8 if options.get("bidirectional") else 4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0])


class SelfAttention(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options
        self.core = nn.MultiheadAttention(6, 2, batch_first=True)
        self.head = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x, x, x, **self.options)[0])


class Fused(nn.Module):
    """F.scaled_dot_product_attention."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.qkv, self.head = nn.Linear(6, 18), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (2, 3)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.head(out.transpose(1, 2).flatten(2))


class Bag(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.core, self.head = nn.EmbeddingBag(7, 4, **options), nn.Linear(4, 2)

    def forward(self, input: Tensor, offsets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        return self.head(torch.tanh(self.core(input, offsets, per_sample_weights=weights)))


def bags(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, Any]]:
    def build() -> tuple[nn.Module, Any]:
        index = torch.tensor([[1, 2, 4], [4, 3, 2], [0, 0, 6], [5, 5, 5]])
        listed = torch.tensor([1, 2, 4, 5, 4, 3, 2, 6])
        inputs: dict[str, Any] = {
            "matrix": index,
            "offsets": {"input": listed, "offsets": torch.tensor([0, 3, 3, 7])},  # the second bag is empty
            "weights": {"input": index, "weights": torch.rand(4, 3) + 0.5},
        }
        return Bag(**options), inputs[kind]

    return build


def sequences(width: int, build: Callable[[], nn.Module]) -> Callable[[], tuple[nn.Module, Any]]:
    return lambda: (build(), torch.randn(3, 5, width))


KERNELS: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
    "LSTM": sequences(3, lambda: Recurrent(nn.LSTM)),
    "LSTM of two layers, both ways": sequences(3, lambda: Recurrent(nn.LSTM, num_layers=2, bidirectional=True)),
    "GRU": sequences(3, lambda: Recurrent(nn.GRU)),
    "RNN": sequences(3, lambda: Recurrent(nn.RNN)),
    "RNN of ReLU": sequences(3, lambda: Recurrent(nn.RNN, nonlinearity="relu")),
    "MultiheadAttention": sequences(6, lambda: SelfAttention()),
    "MultiheadAttention without weights": sequences(6, lambda: SelfAttention(need_weights=False)),
    "TransformerEncoderLayer": sequences(6, lambda: nn.TransformerEncoderLayer(6, 2, 7, batch_first=True)),
    "scaled_dot_product_attention": sequences(6, lambda: Fused(False)),
    "causal attention": sequences(6, lambda: Fused(True)),
    "bag, sum": bags("matrix", mode="sum"),
    "bag, mean": bags("matrix", mode="mean"),
    "bag, max": bags("matrix", mode="max"),
    "bag, padding": bags("matrix", mode="mean", padding_idx=5),
    "bag, max, padding": bags("matrix", mode="max", padding_idx=2),
    "bag, offsets, sum": bags("offsets", mode="sum"),
    "bag, offsets, mean": bags("offsets", mode="mean"),
    "bag, offsets, max": bags("offsets", mode="max"),
    "bag, offsets, padding": bags("offsets", mode="mean", padding_idx=4),
    "bag, weights": bags("weights", mode="sum"),
    "bag, weights, padding": bags("weights", mode="sum", padding_idx=2),
}


def cast(x: Any, dtype: torch.dtype) -> Any:
    if isinstance(x, dict):
        return {k: cast(v, dtype) for k, v in x.items()}
    return x.to(dtype) if x.is_floating_point() else x


def run(x: Any) -> Callable[[nn.Module], Tensor]:
    return lambda m: m(**x) if isinstance(x, dict) else m(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kernel", KERNELS)
def test_jvp_and_vjp_on_kernels_that_lack_forward_mode(kernel: str, dtype: torch.dtype, jacobian: Oracle) -> None:
    """The oracle is the same network in float64; oneDNN takes LSTMs in float32 only."""
    model, x = KERNELS[kernel]()
    expected = jacobian(copy.deepcopy(model).double(), run(cast(x, torch.float64)))
    tolerance = 1e-8 if dtype == torch.float64 else 1e-4
    model, x = model.to(dtype), cast(x, dtype)
    tangent = linearize(model)
    v = direction(tangent)
    u = torch.randn(expected.shape[:-1], dtype=dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        first, second, pulled = tangent.jvp(x, v), tangent.jvp(x, v), tangent.vjp(x, u)
    close(first.double(), expected @ flat(v).double(), tolerance)
    assert torch.equal(first, second)  # found a route, and took it again
    assert tangent.facts.push in ("forward", "unfused")  # none of torch's own kernels needs two reverse passes
    close(flat(pulled).double(), u.reshape(-1).double() @ expected.reshape(u.numel(), -1), tolerance)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "ttention" in k or "Transformer" in k])
def test_rows_on_attention_are_batched(kernel: str, jacobian: Oracle) -> None:
    model, x = KERNELS[kernel]()
    model, x = model.double(), cast(x, torch.float64)
    tangent = linearize(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        close(tangent.rows(x), jacobian(model, run(x)))


def one_warning_at_most(tangent: TangentModel, x: Any) -> Tensor:
    """rows, twice: at most one warning, and that one of Lapwing's."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        rows = tangent.rows(x)
        close(tangent.rows(x), rows)
    assert [w.category for w in caught] in ([], [LapwingWarning])
    return rows


@pytest.mark.parametrize("kernel", ["LSTM", "LSTM of two layers, both ways", "GRU", "RNN", "RNN of ReLU"])
def test_rows_on_recurrent_networks_fall_back_to_a_loop_and_say_so_once(kernel: str, jacobian: Oracle) -> None:
    model, x = KERNELS[kernel]()
    model, x = model.double(), cast(x, torch.float64)
    tangent = linearize(model)
    close(one_warning_at_most(tangent, x), jacobian(model, run(x)))


@pytest.mark.parametrize("kernel", ["GRU", "RNN", "LSTM"])
def test_rows_on_recurrent_networks_in_float32(kernel: str, jacobian: Oracle) -> None:
    model, x = KERNELS[kernel]()
    expected = jacobian(copy.deepcopy(model).double(), run(cast(x, torch.float64)))
    close(one_warning_at_most(linearize(model), x).double(), expected, 1e-4)


@pytest.mark.parametrize("kernel", [k for k in KERNELS if "bag" in k])
def test_rows_on_embedding_bags(kernel: str, jacobian: Oracle) -> None:
    model, x = KERNELS[kernel]()
    model, x = model.double(), cast(x, torch.float64)
    close(one_warning_at_most(linearize(model), x), jacobian(model, run(x)))


class Later(nn.Module):
    """A recurrent branch that short sequences do not take."""

    def __init__(self) -> None:
        super().__init__()
        self.core, self.short, self.head = nn.LSTM(3, 4, batch_first=True), nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.core(x)[0][:, -1] if x.shape[1] > 2 else self.short(x).mean(1))


def test_jvp_finds_another_route_when_a_later_batch_needs_one(jacobian: Oracle) -> None:
    model = Later()
    tangent = linearize(model)
    v = direction(tangent)
    for length in (2, 5):
        x = torch.randn(4, length, 3)
        expected = jacobian(copy.deepcopy(model).double(), lambda m, x=x: m(x.double())) @ flat(v).double()
        close(tangent.jvp(x, v).double(), expected, 1e-4)


class Cube(torch.autograd.Function):
    """Of the user's own: no forward mode, no batching rule, and a second derivative."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x**3

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


class OldCube(Cube):
    """In the style that torch.func refuses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(x)
        return x**3

    setup_context = torch.autograd.Function.setup_context  # type: ignore[assignment]


@pytest.mark.parametrize(
    "function",
    [Cube, OldCube],
)
def test_functions_of_the_users_own_take_two_reverse_passes(function: Any, jacobian: Oracle) -> None:
    class Own(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return self[1](function.apply(self[0](x)))

    model, x = Own(nn.Linear(3, 4), nn.Linear(4, 2)).double(), torch.randn(5, 3, dtype=torch.float64)
    tangent, expected = linearize(model), jacobian(model, lambda m: m(x))
    v, u = direction(tangent), torch.randn(5, 2, dtype=torch.float64)
    close(one_warning_at_most(tangent, x), expected)
    close(tangent.jvp(x, v), expected @ flat(v))
    close(flat(tangent.vjp(x, u)), u.reshape(-1) @ expected.reshape(10, -1))


def test_a_wrong_input_does_not_cost_the_fast_route(mlp: nn.Module, regression: tuple[Tensor, Tensor]) -> None:
    tangent = linearize(mlp)
    x, u = regression
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            tangent.pulled(x[:, :3], u.unsqueeze(1))
    assert tangent.facts.rows in (None, "vmap")


def test_plain_kernels_give_the_switches_back_after_an_error() -> None:
    """The autouse fixture of conftest.py looks at them after every test."""
    for onednn in (True, False):
        with plain_kernels(onednn):
            assert not torch.backends.mha.get_fastpath_enabled()
            assert onednn or not torch.backends.mkldnn.enabled
        with pytest.raises(ZeroDivisionError), plain_kernels(onednn):
            raise ZeroDivisionError


# -- embedding bags from gathers -------------------------------------------------------------------------------------

MATRIX = torch.tensor([[1, 2, 4], [4, 3, 2], [0, 0, 6], [5, 5, 5]])
LIST = torch.tensor([1, 2, 4, 5, 4, 3, 2, 6])


@pytest.mark.parametrize("padding_idx", [None, 0, 2, 5, -2])
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_a_composed_embedding_bag_is_an_embedding_bag(mode: str, padding_idx: int | None) -> None:
    """Values and gradients; bags of equal and unequal lengths, empty ones, and ones of padding alone."""
    calls: list[tuple[Tensor, Tensor | None, dict[str, Any]]] = [
        (MATRIX, None, {}),
        (MATRIX.int(), None, {}),
        (LIST, torch.tensor([0, 3, 3, 7]), {}),
        (LIST, torch.tensor([0]), {}),
        (LIST, torch.tensor([0, 3, 3, 8]), {"include_last_offset": True}),
        (LIST, torch.tensor([0, 1, 8]), {"include_last_offset": True}),
    ]
    for index, offsets, options in calls:
        weights = [torch.randn(7, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) for _ in range(2)]
        for w in weights:
            w.requires_grad_()
        options = {**options, "mode": mode, "padding_idx": padding_idx}
        ours = composed_embedding_bag(index, weights[0], offsets, **options)
        theirs = F.embedding_bag(index, weights[1], offsets, **options)
        close(ours, theirs)
        u = torch.randn_like(theirs)
        close(torch.autograd.grad(ours, weights[0], u)[0], torch.autograd.grad(theirs, weights[1], u)[0])


@pytest.mark.parametrize("padding_idx", [None, 2, 4])
def test_a_composed_embedding_bag_weighs_its_samples(padding_idx: int | None) -> None:
    w = torch.randn(7, 3, dtype=torch.float64)
    for index, offsets in [(MATRIX, None), (LIST, torch.tensor([0, 3, 3, 7]))]:
        each = torch.rand(index.shape, dtype=torch.float64).requires_grad_()
        options: dict[str, Any] = {"mode": "sum", "padding_idx": padding_idx, "per_sample_weights": each}
        ours = composed_embedding_bag(index, w, offsets, **options)
        theirs = F.embedding_bag(index, w, offsets, **options)
        close(ours, theirs)
        u = torch.randn_like(theirs)
        close(torch.autograd.grad(ours, each, u)[0], torch.autograd.grad(theirs, each, u)[0])


def test_the_derivative_of_a_largest_entry_goes_to_the_first_of_equals() -> None:
    w = torch.ones(7, 3, dtype=torch.float64, requires_grad=True)
    for function in (composed_embedding_bag, F.embedding_bag):
        grad = torch.autograd.grad(function(MATRIX, w, mode="max").sum(), w)[0]
        assert grad[:, 0].tolist() == [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0]


# -- rows in blocks of columns ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [1, 700, 5_000, 10**9])
def test_streamed_columns_are_columns_of_the_rows(
    network: tuple[nn.Module, Tensor], budget: int, jacobian: Oracle
) -> None:
    """R = uᵀJ over two batches, by ranges; a budget of a byte makes one column at a time, of one example each."""
    model, x = network
    tangent = linearize(model)
    batches = []
    for part in (x[:1], x[1:]):
        f = tangent(part)
        batches.append((part, torch.randn(len(f), 2, *f.shape[1:], dtype=torch.float64)))
    full = jacobian(model, lambda m: m(x))
    full = full.reshape(len(x), -1, full.shape[-1])
    expected = torch.cat([u for _, u in batches]).flatten(2) @ full  # (n, 2, p)
    expected = expected.reshape(-1, expected.shape[-1])
    rows = StreamedRows(tangent, tuple(batches), budget)
    assert rows.shape == tuple(expected.shape)
    assert rows.held == (8 * expected.numel() <= budget)
    ranges = list(rows.ranges())
    assert ranges[0][0] == 0
    assert ranges[-1][1] == tangent.layout.size
    assert all(a[1] == b[0] for a, b in pairwise(ranges))  # in order, none left out
    widest = max(stop - start for start, stop in ranges)
    assert rows.held or widest == 1 or 16 * rows.shape[0] * widest <= budget
    for start, stop in ranges if budget > 1 else ranges[:: len(ranges) // 5]:
        close(rows.block(start, stop), expected[:, start:stop])
    close(rows.block(3, 17), expected[:, 3:17])  # and any other
    assert len(ranges) == {1: tangent.layout.size, 10**9: 1}.get(budget, len(ranges))


def test_rows_that_are_outer_products_say_so(network: tuple[nn.Module, Tensor], jacobian: Oracle) -> None:
    """A pair's columns of every row are g ⊗ a; with the ranges without them, they are all columns, each once."""
    model, x = network
    tangent = linearize(model)
    batches = []
    for part in (x[:1], x[1:]):
        f = tangent(part)
        batches.append((part, torch.randn(len(f), 2, *f.shape[1:], dtype=torch.float64)))
    full = jacobian(model, lambda m: m(x))
    full = full.reshape(len(x), -1, full.shape[-1])
    expected = (torch.cat([u for _, u in batches]).flatten(2) @ full).reshape(2 * len(x), -1)
    rows = StreamedRows(tangent, tuple(batches), 10**5)
    for pair in rows.pairs.values():
        assert pair.a.dtype == pair.g.dtype == torch.float64
        outer = (pair.g.unsqueeze(-1) * pair.a.unsqueeze(-2)).flatten(1)
        close(outer, expected[:, pair.index])
    left = [c for start, stop in rows.ranges(0, frozenset(rows.pairs)) for c in range(start, stop)]
    paired = [int(c) for pair in rows.pairs.values() for c in pair.index]
    assert sorted(left + paired) == list(range(tangent.layout.size))
    linear = [m for m in model.modules() if isinstance(m, nn.Linear)]
    assert len(rows.pairs) == (len(linear) if tangent(x).ndim == 2 else 0)  # with positions, a row is a sum of them


def test_streamed_ranges_leave_room_for_rows_beside_them(mlp: nn.Module, regression: tuple[Tensor, Tensor]) -> None:
    rows = StreamedRows(linearize(mlp), ((regression[0], torch.ones(11, 1, 3).double()),), 2_000)
    alone, beside = (max(stop - start for start, stop in rows.ranges(b)) for b in (0, 33))
    assert alone == 2_000 // (16 * 11)
    assert beside == 2_000 // (16 * 44)


def test_pieces_of_a_batch_are_the_batch(mlp: nn.Module) -> None:
    def forward(model: nn.Module, x: dict) -> Tensor:
        return model(x["a"])

    tangent = linearize(mlp, forward=forward)
    wide = next(mlp.parameters()).shape[1]
    x, u = {"a": torch.randn(7, wide).double(), "flag": True}, torch.arange(14).reshape(7, 2)
    for budget, sizes in [(1, [1] * 7), (30, [3, 3, 1]), (70, [7]), (69, [6, 1]), (10**6, [7])]:
        pieces = list(tangent.pieces(x, u, budget // 10))
        assert [len(part) for _, part in pieces] == sizes
        assert torch.equal(torch.cat([piece["a"] for piece, _ in pieces]), x["a"])
        assert torch.equal(torch.cat([part for _, part in pieces]), u)
        assert all(piece["flag"] is True for piece, _ in pieces)
    graph = {"a": torch.zeros(7, wide).double(), "edges": torch.zeros(2, 9)}
    assert [len(part) for _, part in tangent.pieces(graph, u, 0)] == [7]  # cannot be cut


def test_a_network_that_mixes_its_batch_is_never_cut(mlp: nn.Module) -> None:
    """Node outputs over one graph: first dimensions agree, but an example by itself is not what it was."""
    adjacency = torch.rand(5, 5).double()
    x = (torch.randn(5, next(mlp.parameters()).shape[1]).double(), adjacency)
    tangent = linearize(mlp, forward=lambda model, x: x[1] @ model(x[0]))
    assert not tangent.separable(x)
    with pytest.warns(LapwingWarning, match="cannot be cut"):
        rows = tangent.rows(x)
    for i in range(5):
        for j in range(rows.shape[1]):
            unit = torch.zeros(5, rows.shape[1]).double()
            unit[i, j] = 1
            torch.testing.assert_close(rows[i, j], tangent.layout.flatten(tangent.vjp(x, unit)))


class Padded(nn.Module):
    """Padding in the embedding, whose weight the head has too: there its row moves."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(6, 4, padding_idx=-2), nn.Linear(4, 6, bias=False)
        nn.init.normal_(self.embedding.weight)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embedding(x)).sum(1))


@pytest.mark.parametrize("tied", [False, True])
def test_forward_mode_leaves_padding_where_reverse_mode_does(tied: bool) -> None:
    torch.manual_seed(1)
    net, x = Padded(tied).double(), torch.tensor([[4, 1, 0], [4, 4, 2], [3, 5, 4]])
    tangent = linearize(net)
    v = torch.randn(2, tangent.layout.size, dtype=torch.float64)
    rows = tangent.rows(x)  # by reverse mode
    expected = torch.einsum("ncp,kp->knc", rows, v)
    assert_close(tangent.jvps(x, v)[1], expected)
    assert_close(tangent.jvp(x, tangent.layout.unflatten(v[0])), expected[0])
    pushed, pulled = tangent.through(x, v[0], lambda f, jv: jv)
    assert_close(pushed, expected[0])
    assert_close(pulled, torch.einsum("ncp,nc->p", rows, expected[0]))
    out = torch.autograd.grad(net(x)[0, 1], net.embedding.weight)[0]
    assert_close(tangent.layout.unflatten(rows[0, 1])["embedding.weight"], out)
