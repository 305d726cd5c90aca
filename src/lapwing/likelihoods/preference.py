"""Preferences: of two items with rewards f = (f_0, f_1), y says which was preferred (Bradley and Terry):

    P(y = 0) = sigmoid(f_0 − f_1) = softmax(f)_0

a softmax of two classes, to which a common shift of rewards is invisible. `Pairs` makes the network of it from a reward
model with one output.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lapwing.errors import InvalidValue
from lapwing.likelihoods.categorical import Categorical


class Pairs(nn.Module):
    """A reward model on both items of a pair: x (n, 2, ...) -> (n, 2)."""

    def __init__(self, reward: nn.Module) -> None:
        super().__init__()
        self.reward = reward

    def forward(self, x: Tensor) -> Tensor:
        if x.ndim < 2 or x.shape[1] != 2:
            raise InvalidValue(f"Pairs takes inputs (n, 2, ...), the two items of each pair, got {tuple(x.shape)}")
        out = self.reward(x.flatten(0, 1))
        if out.numel() != 2 * len(x):
            raise InvalidValue(f"a reward model has one output an item, got {tuple(out.shape)} for {2 * len(x)} items")
        return out.reshape(-1, 2)


@dataclass(frozen=True)
class BradleyTerry(Categorical):
    """Which of two items is preferred, y (n,) in {0, 1}, by their rewards f (n, 2)."""

    def validate(self, f: Tensor, y: Tensor) -> None:
        if f.shape[-1] != 2:
            raise InvalidValue(
                f"bradleyterry takes the rewards of two items, got {f.shape[-1]} outputs; wrap a reward model in "
                "lw.likelihoods.Pairs"
            )
        super().validate(f, y)

    def target_note(self, y: Tensor, outputs: int) -> str:
        return ""  # the preferred item may always come first

    def constant(self, y: Tensor) -> Tensor:
        return torch.zeros(2, dtype=torch.float64)  # equal rewards
