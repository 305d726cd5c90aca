"""The test examples that a fit is least sure of: images as images, anything else as numbers.

Images are inputs (n, c, h, w) of 1 or 3 channels, (n, h, w), and flat ones (n, h²) of 64 numbers or more. Each is
stretched to its own range of gray or color. A PNG is a signature and chunks: length, type, data, CRC-32.
"""

from __future__ import annotations

import base64
import math
import struct
import zlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lapwing import tree
from lapwing.report.charts import short_of
from lapwing.report.facts import ReportFacts, Scored, hard_labels

COUNT = 12
LEAST = 64  # numbers of a flat input that can be a square image
NUMBERS = 6  # of an input in a table


@dataclass(frozen=True)
class Example:
    """One test example."""

    place: int  # in the test data
    picture: str  # a data URI, or ""
    numbers: str  # the input in words where there is no picture
    predicted: str
    happened: str
    wrong: bool


def most_uncertain(facts: ReportFacts) -> list[Example]:
    """Those of the first fit, the least sure first; none where it has no uncertainty to rank by."""
    one = facts.fits[0]
    if one.uncertainty is None:
        return []
    order = one.uncertainty.argsort(descending=True, stable=True)[:COUNT].tolist()
    shown = images(facts.inputs)
    return [_example(facts, one, i, None if shown is None else shown[i]) for i in order]


def _example(facts: ReportFacts, one: Scored, i: int, picture: Tensor | None) -> Example:
    uri = "" if picture is None else f"data:image/png;base64,{base64.b64encode(png(picture)).decode()}"
    said, was, wrong = (_class if one.classes else _number)(facts, one, i)
    return Example(i, uri, "" if uri else _numbers(facts.inputs, i), said, was, wrong)


def _class(facts: ReportFacts, one: Scored, i: int) -> tuple[str, str, bool]:
    assert one.labels is not None
    assert one.uncertainty is not None
    label, y = one.labels[i], hard_labels(one.prediction, facts.targets)[i]
    wrong = not bool((label.flatten() == y.flatten()).all())
    return f"{_listed(label)} ({100 * (1 - float(one.uncertainty[i])):.0f}\u00a0%)", _listed(y), wrong


def _number(facts: ReportFacts, one: Scored, i: int) -> tuple[str, str, bool]:
    """Wrong: outside of the interval."""
    mean, std = one.prediction.mean[i].flatten().tolist(), one.prediction.std[i].flatten().tolist()
    y = one.prediction.likelihood.aligned(one.prediction.f_mean, facts.targets)[i]
    assert one.interval is not None
    outside = bool(((y < one.interval[0][i]) | (y > one.interval[1][i])).any())
    pairs = zip(mean[:NUMBERS], std[:NUMBERS], strict=True)
    return ", ".join(f"{short_of(m)} ± {short_of(s)}" for m, s in pairs), _listed(y), outside


def _listed(values: Tensor) -> str:
    flat = values.flatten().tolist()
    shown = [f"{v}" if isinstance(v, int) else short_of(v) for v in flat[:NUMBERS]]
    return ", ".join(shown) + (", …" if len(flat) > NUMBERS else "")


def _numbers(inputs: Any, i: int) -> str:
    return "; ".join(_listed(t[i]) for t in tree.tensors(inputs) if t.ndim)


# -- images ----------------------------------------------------------------------------------------------------------


def images(x: Any) -> Tensor | None:
    """(n, h, w, 1 or 3), bytes; None where inputs are no images."""
    if not isinstance(x, Tensor) or x.is_complex():
        return None
    side = math.isqrt(x.shape[-1]) if x.ndim == 2 else 0
    if side and side * side == x.shape[-1] >= LEAST:
        x = x.reshape(len(x), 1, side, side)
    elif x.ndim == 3 and min(x.shape[1:]) >= 8:
        x = x.unsqueeze(1)
    if x.ndim != 4 or x.shape[1] not in (1, 3) or min(x.shape[2:]) < 2:
        return None
    x = x.detach().cpu().double()
    low, high = x.amin((1, 2, 3), keepdim=True), x.amax((1, 2, 3), keepdim=True)
    gray = (x - low) / torch.where(high > low, high - low, 1.0)
    return (255 * gray).round().to(torch.uint8).permute(0, 2, 3, 1)


def png(image: Tensor) -> bytes:
    """A PNG of bytes (h, w, 1 or 3)."""
    height, width, channels = image.shape
    rows = torch.cat([image.new_zeros(height, 1), image.reshape(height, -1)], 1)  # each row unfiltered: type 0
    header = struct.pack(">IIBBBBB", width, height, 8, {1: 0, 3: 2}[channels], 0, 0, 0)
    content = zlib.compress(rows.contiguous().numpy().tobytes(), 9)
    chunks = ((b"IHDR", header), (b"IDAT", content), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)


def _chunk(kind: bytes, content: bytes) -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))
