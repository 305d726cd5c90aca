"""Which parameters are selected: all, the last layer found by tracing, globs, element masks; and what is refused."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.testing import assert_close

from lapwing.errors import InvalidValue
from lapwing.tangent import linearize
from lapwing.tree import Layout


def names(model: nn.Module, subset: Any, example: Any = None, forward: Any = None) -> tuple[str, ...]:
    return linearize(model, subset, example=example, forward=forward).layout.names


def batch(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


# -- all -------------------------------------------------------------------------------------------------------------


def test_all_is_every_parameter_in_order(mlp: nn.Module) -> None:
    layout = linearize(mlp).layout
    assert list(layout.shapes.items()) == [(n, p.shape) for n, p in mlp.named_parameters()]
    assert layout.size == 39
    assert not layout.masks


def test_all_leaves_frozen_parameters_out(mlp: nn.Module) -> None:
    mlp[0].requires_grad_(False)  # type: ignore[index]
    assert names(mlp, "all") == ("2.weight", "2.bias")


def test_a_subset_that_is_no_subset_is_named(mlp: nn.Module) -> None:
    for subset in ("everything", 3, None):
        with pytest.raises(InvalidValue, match="last_layer"):
            linearize(mlp, subset)


# -- the last layer, by tracing --------------------------------------------------------------------------------------


def test_the_last_layer_of_an_mlp(mlp: nn.Module) -> None:
    assert names(mlp, "last_layer", batch(2, 5)) == ("2.weight", "2.bias")


def test_the_last_layer_of_a_cnn(cnn: nn.Module, images: Tensor) -> None:
    assert names(cnn, "last_layer", images) == ("4.weight", "4.bias")


def test_the_last_layer_of_a_sequence_model(tokens: nn.Module) -> None:
    assert names(tokens, "last_layer", torch.zeros(2, 4).long()) == ("head.weight",)


def test_layers_without_parameters_may_follow_the_last(mlp: nn.Module) -> None:
    assert names(nn.Sequential(mlp, nn.Softplus(), nn.Flatten()), "last_layer", batch(2, 5)) == (
        "0.2.weight",
        "0.2.bias",
    )


def test_the_last_layer_may_be_a_convolution_or_a_norm() -> None:
    net = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Conv2d(3, 2, 1, bias=False), nn.AdaptiveAvgPool2d(1), nn.Flatten())
    assert names(net.double(), "last_layer", batch(2, 2, 3, 4)) == ("1.weight",)
    net = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4))
    assert names(net.double(), "last_layer", batch(2, 3)) == ("1.weight", "1.bias")


class Head(nn.Module):
    """The head is registered first; `use` says how the output is made."""

    def __init__(self, use: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.head, self.body = nn.Linear(4, 2), nn.Linear(3, 4)
        self.skip = nn.Linear(3, 2, bias=False)
        self.scale = nn.Parameter(torch.ones(2))
        self.token = nn.Parameter(torch.ones(4))
        self.use = use
        self.double()

    def forward(self, x: Tensor) -> Any:
        return self.use(self, x)


def test_the_last_layer_is_the_last_called_not_the_last_registered() -> None:
    model = Head(lambda m, x: m.head(torch.tanh(m.body(x))))
    assert names(model, "last_layer", batch(2, 3)) == ("head.weight", "head.bias")


def test_a_bare_parameter_before_the_head_does_not_hide_the_head() -> None:
    """A class token, a position embedding: the module that owns it returns last, the head is still the last layer."""
    model = Head(lambda m, x: m.head(torch.tanh(m.body(x) + m.token)))
    assert names(model, "last_layer", batch(2, 3)) == ("head.weight", "head.bias")
    assert names(nn.Sequential(model, nn.Tanh()), "last_layer", batch(2, 3)) == ("0.head.weight", "0.head.bias")


def test_a_bare_parameter_after_the_head_is_an_error_that_names_it() -> None:
    model = Head(lambda m, x: m.head(torch.tanh(m.body(x))) * m.scale)
    with pytest.raises(InvalidValue, match="no last layer") as caught:
        linearize(model, "last_layer", example=batch(2, 3))
    assert "'scale'" in str(caught.value)
    assert "head" in str(caught.value)
    assert "body" not in str(caught.value)


def test_a_skip_around_the_head_is_an_error_that_names_it() -> None:
    def skip_first(m: Any, x: Tensor) -> Tensor:
        around = m.skip(x)
        return m.head(torch.tanh(m.body(x))) + around

    with pytest.raises(InvalidValue, match="no last layer") as caught:
        linearize(Head(skip_first), "last_layer", example=batch(2, 3))
    assert "skip.weight" in str(caught.value)
    assert "body" not in str(caught.value)


def test_a_skip_of_inputs_alone_is_no_obstacle() -> None:
    model = Head(lambda m, x: m.head(torch.tanh(m.body(x))) + x[:, :2])
    assert names(model, "last_layer", batch(2, 3)) == ("head.weight", "head.bias")


def test_a_weight_used_functionally_after_the_head_is_an_error_that_names_it() -> None:
    model = Head(lambda m, x: F.linear(m.head(torch.tanh(m.body(x))), m.skip.weight[:, :2]))
    with pytest.raises(InvalidValue, match=r"skip\.weight"):
        linearize(model, "last_layer", example=batch(2, 3))


def test_a_head_tied_to_another_layer_is_no_last_layer() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.head = nn.Embedding(5, 3), nn.Linear(3, 5)
            self.head.weight = self.embedding.weight

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.embedding(x).sum(1)))

    with pytest.raises(InvalidValue, match=r"embedding\.weight"):
        linearize(Tied(), "last_layer", example=torch.zeros(2, 4).long())


def test_a_module_called_twice_is_cut_behind_its_last_call(jacobian: Callable[..., Tensor]) -> None:
    """Its rows are those of both calls."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.shared, self.middle = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.shared(torch.tanh(self.middle(torch.tanh(self.shared(x)))))

    model, x = Twice().double(), batch(4, 3)
    tangent = linearize(model, "last_layer", example=x)
    assert tangent.layout.names == ("shared.weight", "shared.bias")
    assert_close(tangent.rows(x), jacobian(model, lambda m: m(x))[..., :12], rtol=1e-8, atol=1e-8)


def test_a_skip_from_an_earlier_call_of_the_last_module_is_an_error() -> None:
    def twice(m: Any, x: Tensor) -> Tensor:
        first = m.body(x)
        return first + m.body(torch.tanh(first[:, :3]))

    with pytest.raises(InvalidValue, match=r"no last layer.*body\.weight"):
        linearize(Head(twice), "last_layer", example=batch(2, 3))


def test_a_model_that_is_one_module_is_its_own_last_layer() -> None:
    assert names(nn.Linear(3, 2).double(), "last_layer", batch(2, 3)) == ("weight", "bias")

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w, self.b = nn.Parameter(batch(3, 2)), nn.Parameter(batch(2))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.w + self.b

    assert names(Bare(), "last_layer", batch(2, 3)) == ("w", "b")


def test_without_a_called_module_there_is_no_last_layer() -> None:
    model = nn.Linear(3, 2).double()
    with pytest.raises(InvalidValue, match="no module with parameters was called"):
        linearize(model, "last_layer", example=batch(2, 3), forward=lambda m, x: x @ m.weight.T)


def test_a_last_module_that_returns_no_tensor_is_named() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.attention = nn.Linear(4, 4), nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, x: Tensor) -> Tensor:
            x = self.body(x)
            return self.attention(x, x, x)[0]

    with pytest.raises(InvalidValue, match=r"attention.*returns tuple"):
        linearize(Attention().double(), "last_layer", example=batch(2, 3, 4))


def test_a_model_that_returns_no_tensor_has_no_last_layer() -> None:
    with pytest.raises(InvalidValue, match=r"returns dict.*forward="):
        linearize(Head(lambda m, x: {"scores": m.head(m.body(x))}), "last_layer", example=batch(2, 3))


def test_tracing_leaves_buffers_and_hooks_alone() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.count: Tensor
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return self.linear(x)

    model = Counting().double()
    assert names(model, "last_layer", batch(2, 3)) == ("linear.weight", "linear.bias")
    assert float(model.count) == 0.0
    assert not model.linear._forward_hooks
    assert not model.linear._forward_pre_hooks


def test_the_last_layer_needs_an_example_and_takes_a_hook(mlp: nn.Module) -> None:
    with pytest.raises(InvalidValue, match="example="):
        linearize(mlp, "last_layer")
    hooked = names(mlp, "last_layer", {"x": batch(2, 5)}, forward=lambda m, x: m(x["x"]))
    assert hooked == ("2.weight", "2.bias")


def test_a_frozen_body_does_not_change_the_last_layer(mlp: nn.Module) -> None:
    mlp[0].requires_grad_(False)  # type: ignore[index]
    assert names(mlp, "last_layer", batch(2, 5)) == ("2.weight", "2.bias")


def test_the_last_layer_is_linear_in_its_weights(cnn: nn.Module, images: Tensor) -> None:
    """f(x, θ + v) = f(x, θ) + J v, for any v."""
    tangent = linearize(cnn.eval(), "last_layer", example=images)
    v = {n: torch.randn_like(p) for n, p in tangent.params.items()}
    moved = tangent.apply({n: p + v[n] for n, p in tangent.params.items()}, images)
    assert_close(moved, tangent(images) + tangent.jvp(images, v), rtol=1e-8, atol=1e-8)


# -- globs -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("patterns", "chosen"),
    [
        (["2.*"], ("2.weight", "2.bias")),
        (["*.bias"], ("0.bias", "2.bias")),
        (["2.bias", "0.weight"], ("0.weight", "2.bias")),  # in the order of the model
        (["*.weight", "2.*"], ("0.weight", "2.weight", "2.bias")),  # once each
        (["[02].bias"], ("0.bias", "2.bias")),
        (("?.weight",), ("0.weight", "2.weight")),
    ],
)
def test_globs_select_by_name(mlp: nn.Module, patterns: Any, chosen: tuple[str, ...]) -> None:
    assert names(mlp, patterns) == chosen


def test_a_glob_that_matches_nothing_is_an_error(mlp: nn.Module) -> None:
    with pytest.raises(InvalidValue, match=r"'head\.\*' matches no parameter.*2\.bias"):
        linearize(mlp, ["2.*", "head.*"])
    with pytest.raises(InvalidValue, match="empty"):
        linearize(mlp, [])
    with pytest.raises(InvalidValue, match="globs"):
        linearize(mlp, [mlp])


def test_globs_are_case_sensitive(mlp: nn.Module) -> None:
    with pytest.raises(InvalidValue, match="matches no parameter"):
        linearize(mlp, ["*.Bias"])


def test_a_glob_selects_frozen_parameters_too(mlp: nn.Module) -> None:
    mlp.requires_grad_(False)
    assert names(mlp, ["2.*"]) == ("2.weight", "2.bias")
    assert not any(p.requires_grad for p in mlp.parameters())


# -- masks -----------------------------------------------------------------------------------------------------------


def test_masks_select_elements(mlp: nn.Module) -> None:
    mask = torch.zeros(4, 5, dtype=torch.bool)
    mask[1, 3] = mask[2, 0] = mask[2, 4] = True
    layout = linearize(mlp, {"2.bias": torch.ones(3, dtype=torch.bool), "0.weight": mask}).layout
    assert layout.names == ("0.weight", "2.bias")
    assert layout.size == 6
    assert layout.shape("0.weight") == (3,)
    assert layout.shape("2.bias") == (3,)
    assert list(layout.masks) == ["0.weight"]
    assert linearize(mlp, {"0.weight": mask}).theta.tolist() == mlp[0].weight[mask].tolist()  # type: ignore[index]


def test_a_full_mask_is_all(mlp: nn.Module) -> None:
    full = {n: torch.ones_like(p, dtype=torch.bool) for n, p in mlp.named_parameters()}
    layout = linearize(mlp, full).layout
    assert not layout.masks
    assert layout.same_as(linearize(mlp).layout)


def test_an_empty_mask_leaves_its_parameter_out(mlp: nn.Module) -> None:
    masks = {"0.bias": torch.zeros(4, dtype=torch.bool), "2.bias": torch.tensor([True, False, False])}
    assert names(mlp, masks) == ("2.bias",)


def test_a_mask_of_the_user_may_change_afterwards(mlp: nn.Module) -> None:
    mask = torch.tensor([True, False, False])
    layout = linearize(mlp, {"2.bias": mask}).layout
    mask[:] = True
    assert layout.size == 1


def test_masks_that_do_not_fit_are_named(mlp: nn.Module) -> None:
    good = torch.ones(3, dtype=torch.bool)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"2.bias": torch.ones(4, dtype=torch.bool)}, r"2\.bias must be bool of shape \(3,\)"),
        ({"2.bias": torch.ones(3)}, "float32"),
        ({"2.bias": torch.ones(3, dtype=torch.long)}, "int64"),
        ({"2.bias": [True, True, False]}, "list"),
        ({"2.bias": good, "head": good}, "'head', which is no parameter"),
        ({"2.bias": ~good}, "no element"),
        ({}, "no element"),
    ]
    for masks, text in cases:
        with pytest.raises(InvalidValue, match=text):
            linearize(mlp, masks)


def test_masked_elements_go_back_to_their_places(mlp: nn.Module) -> None:
    """embed: the selected elements from the vector, all others from the network."""
    mask = torch.rand(3, 4, generator=torch.Generator().manual_seed(0)) < 0.5
    tangent = linearize(mlp, {"2.weight": mask})
    values = torch.arange(float(mask.sum()), dtype=torch.float64) + 100
    full = tangent.embed({"2.weight": values})["2.weight"]
    expected = mlp[2].weight.detach().clone()  # type: ignore[index]
    expected[mask] = values
    assert torch.equal(full, expected)
    x = batch(2, 5)
    twin = copy.deepcopy(mlp)
    with torch.no_grad():
        twin[2].weight.copy_(expected)  # type: ignore[index]
    assert_close(tangent.apply({"2.weight": values}, x), twin(x).detach(), rtol=1e-12, atol=1e-12)
    assert torch.equal(tangent.embed(tangent.params)["2.weight"], mlp[2].weight.detach())  # type: ignore[index]


# -- layouts ---------------------------------------------------------------------------------------------------------


def masked_layout() -> Layout:
    mask = torch.tensor([[True, False, True], [False, False, True]])
    shapes = {"w": torch.Size([2, 3]), "b": torch.Size([2]), "s": torch.Size([])}
    return Layout(shapes=shapes, masks={"w": mask})


def test_flatten_and_unflatten_are_inverse() -> None:
    layout = masked_layout()
    assert layout.size == 3 + 2 + 1
    vector = batch(4, 6)
    parts = layout.unflatten(vector)
    assert {n: tuple(t.shape) for n, t in parts.items()} == {"w": (4, 3), "b": (4, 2), "s": (4,)}
    single = layout.unflatten(vector[0])
    assert torch.equal(layout.flatten(dict(reversed(single.items()))), vector[0])  # the layout's order, not the dict's
    assert layout.slices() == {"w": slice(0, 3), "b": slice(3, 5), "s": slice(5, 6)}


def test_flatten_takes_leading_dimensions() -> None:
    layout = Layout(shapes={"w": torch.Size([2, 3]), "b": torch.Size([2]), "s": torch.Size([])}, masks={})
    vector = batch(4, 5, 9)
    assert torch.equal(layout.flatten(layout.unflatten(vector), 2), vector)


def test_gather_takes_selected_elements_of_full_tensors() -> None:
    full = {"b": torch.tensor([7.0, 8.0]), "s": torch.tensor(9.0), "w": torch.arange(6.0).reshape(2, 3)}
    assert masked_layout().gather(full).tolist() == [0.0, 2.0, 5.0, 7.0, 8.0, 9.0]


def test_trees_that_do_not_fit_a_layout_are_refused() -> None:
    layout = masked_layout()
    tree = layout.unflatten(batch(6))
    with pytest.raises(InvalidValue, match="expected tensors for"):
        layout.flatten({k: v for k, v in tree.items() if k != "b"})
    with pytest.raises(InvalidValue, match="expected tensors for"):
        layout.flatten({**tree, "more": tree["b"]})
    with pytest.raises(InvalidValue, match="6 parameters, got 5"):
        layout.unflatten(batch(5))
    with pytest.raises(InvalidValue, match=r"b must have shape \(2,\), got \(3,\)"):
        layout.flatten({**tree, "b": batch(3)})
    square = Layout(shapes={"w": torch.Size([2, 3])}, masks={})
    with pytest.raises(
        InvalidValue, match=r"w must have shape \(2, 3\), got \(3, 2\)"
    ):  # as many numbers, in other places
        square.flatten({"w": batch(3, 2)})


def test_layouts_are_the_same_if_names_order_shapes_and_masks_are() -> None:
    layout = masked_layout()
    assert layout.same_as(masked_layout())
    shapes = layout.shapes
    assert not layout.same_as(Layout(shapes=shapes, masks={}))
    assert not layout.same_as(Layout(shapes=shapes, masks={"w": ~layout.masks["w"]}))
    assert not layout.same_as(Layout(shapes=dict(reversed(shapes.items())), masks=layout.masks))
    assert not layout.same_as(Layout(shapes={**shapes, "b": torch.Size([1, 2])}, masks=layout.masks))
