"""a bᵀ of rows, (n, p) and (m, p): (n, m).

In float32 on a CPU by oneDNN, which comes with torch: on AMD processors it is faster than MKL, which `a @ b.mT` is
there (benchmarks/README.md). It wants rows in order in memory: others it copies number by number, and they are left to
`@`.
"""

from __future__ import annotations

import torch
from torch import Tensor


def by_rows(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ."""
    if _by_onednn(a) and _by_onednn(b):
        return torch.ops.mkldnn._linear_pointwise(a, b, None, "none", [], "")
    return a @ b.mT


def _by_onednn(rows: Tensor) -> bool:
    there = hasattr(torch.ops.mkldnn, "_linear_pointwise")  # no public name of PyTorch's: a version may lack it
    usable = there and torch.backends.mkldnn.is_available() and bool(torch.backends.mkldnn.enabled)
    plain = rows.dtype == torch.float32 and rows.device.type == "cpu" and rows.numel() > 0
    return usable and plain and rows.is_contiguous()
