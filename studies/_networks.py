"""What studies of real networks share: the files of LAPWING_DATA, CIFAR-10 and its residual networks."""

from __future__ import annotations

import os
import pathlib
import sys

import numpy as np
import torch
from torch import Tensor, nn

sys.path.insert(0, str(pathlib.Path(__file__).parent.parent / "benchmarks"))

from structured import BasicBlock

MEAN, STD = (0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010)  # that the networks were trained with
TRAIN = "LAPWING_CIFAR_TRAIN"


def data(path: str) -> pathlib.Path:
    """A file of the folder that LAPWING_DATA names."""
    folder = os.environ.get("LAPWING_DATA")
    if folder is None or not (pathlib.Path(folder) / path).is_file():
        raise SystemExit(
            f"this study reads {path} from the folder that LAPWING_DATA names; got {folder!r}. See studies/README.md"
        )
    return pathlib.Path(folder) / path


def train_file() -> pathlib.Path:
    """The 50,000 training images, x (n, 32, 32, 3) uint8 and y: the file of LAPWING_CIFAR_TRAIN, if it is set."""
    path = os.environ.get(TRAIN)
    if path is None:
        return data("cifar10/cifar10_train.npz")
    if not pathlib.Path(path).is_file():
        raise SystemExit(f"{TRAIN} must name the file of CIFAR-10's training images; got {path!r}")
    return pathlib.Path(path)


def normalized(pixels: np.ndarray) -> Tensor:
    """Images (n, 32, 32, 3) uint8 as the networks take them, (n, 3, 32, 32)."""
    x = (torch.from_numpy(pixels) / 255 - torch.tensor(MEAN)) / torch.tensor(STD)
    return x.permute(0, 3, 1, 2).contiguous()


def images(path: pathlib.Path, some: slice = slice(None)) -> tuple[Tensor, Tensor]:
    stored = np.load(path)
    return normalized(stored["x"][some]), torch.from_numpy(stored["y"][some]).long().reshape(-1)


class ResNet(nn.Module):
    """He et al.'s network for CIFAR-10 with 6k + 2 layers and 1 x 1 convolutions as shortcuts."""

    def __init__(self, depth: int = 20) -> None:
        super().__init__()
        if depth % 6 != 2:
            raise ValueError(f"depth must be 6k + 2, got {depth}")
        self.conv1, self.bn1 = nn.Conv2d(3, 16, 3, 1, 1, bias=False), nn.BatchNorm2d(16)
        more = depth // 6 - 1
        self.layer1, self.layer2, self.layer3 = (
            nn.Sequential(BasicBlock(i, o, s), *(BasicBlock(o, o, 1) for _ in range(more)))
            for i, o, s in [(16, 16, 1), (16, 32, 2), (32, 64, 2)]
        )
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.bn1(self.conv1(x)))
        return self.fc(self.layer3(self.layer2(self.layer1(h))).mean((2, 3)))


def resnet(depth: int) -> nn.Module:
    """A trained network, in eval mode."""
    net = ResNet(depth).eval()
    net.load_state_dict(torch.load(data(f"resnet_cifar10/resnet{depth}.pt"), weights_only=True))
    return net
