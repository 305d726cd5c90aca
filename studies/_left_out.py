"""Labels as observations of a process, each left out in closed form; what a network would say of an example that it had
not seen; and how much to believe either (`left_out.py`).

    K (n, n)     a kernel with mean diagonal 1;  M = (K + jI)⁻¹
    f (n, c)     the network's logits, r = f − their column means
    e_n          [M r]_n / M_nn, what the other logits do not foretell;  R² = 1 − Σ‖e_n‖² / Σ‖r_n‖²
    B (c, c)     rᵀ M r / n
    ℓ_nk         f_n − e_n + M_nn^(−½) B^(½) z_k, k = 1 to 16, with fixed normals z_k
    T            max(1, argmin_T Σ −log softmax(ℓ_nk / T)_{y_n})
    m            mean of a process with the kernel K/λ about a constant a class, labels as in Eq. 25
    (a, b)       argmin Σ −log softmax(a ℓ_nk + b m_n)_{y_n},  a in [φ/T, 1],  b in [0, 2]:  softmax(a f + b m)

n data, m new inputs, c classes, k kernels: one for all classes, or one a class.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import minimize
from torch import Tensor

import lapwing as lw

NOISE, FLOOR = 0.003, 0.75  # j, φ
DRAWS = 16


@dataclass(frozen=True)
class Kernel:
    """`rows` (k, n + m, n): training inputs first, then new ones; `variance` (k, m) at the new ones. The mean of the
    diagonal at training inputs is 1."""

    rows: Tensor
    variance: Tensor

    @property
    def train(self) -> Tensor:
        return self.rows[:, : self.rows.shape[2]]

    @property
    def new(self) -> Tensor:
        return self.rows[:, self.rows.shape[2] :]


def normalized(rows: Tensor, variance: Tensor) -> Kernel:
    """`variance` (k, n + m) at all inputs."""
    n = rows.shape[2]
    scale = variance[:, :n].mean()
    return Kernel(rows / scale, variance[:, n:] / scale)


@dataclass(frozen=True)
class Process:
    """Logits as a process about a constant, given labels: left out at training inputs (n, c), at new ones (m, c)."""

    left_mean: Tensor
    left_variance: Tensor
    mean: Tensor
    variance: Tensor


def processes(kernel: Kernel, y: Tensor, classes: int, concentration: float) -> list[Process]:
    """λ by the evidence of N(ỹ; constant, K/λ + s diag σ²): with s = 1, and with s by the evidence too. The constant is
    that of all labels, also where one is left out."""
    labels = lw.likelihoods.Dirichlet(concentration)
    target, noise = (t.mT for t in labels.observations(torch.zeros(len(y), classes).double(), y))  # (c, n)
    constant = labels.constant(y, classes)[:, None]
    r, root = target - constant, noise.sqrt()
    E, U = torch.linalg.eigh(kernel.train / root[:, :, None] / root[:, None])
    E, z2 = E.clamp_min(0), (U.mT @ (r / root)[..., None])[..., 0].square()
    found = []
    for factors in (torch.ones(1), torch.logspace(-2.5, 1, 22)):
        grid = [(E / l + s, l, s) for s in factors.double() for l in torch.logspace(-4, 4, 49).double()]
        D, l, s = min(grid, key=lambda g: float((z2 / g[0] + g[0].log()).sum()))
        M = (U / D[:, None]) @ U.mT / root[:, :, None] / root[:, None]  # (K/λ + s diag σ²)⁻¹
        a, d, Q = (M @ r[..., None])[..., 0], M.diagonal(dim1=1, dim2=2), kernel.new / l
        means = target - a / d, constant + (Q @ a[..., None])[..., 0]
        variances = 1 / d - s * noise, kernel.variance / l - (Q @ M * Q).sum(2)
        made = (t.mT for mean, v in zip(means, variances, strict=True) for t in (mean, v.clamp_min(1e-9)))
        found.append(Process(*made))
    return found


def normals(count: int, size: int) -> Tensor:
    """Fixed quasi-random N(0, I), (count, size)."""
    u = torch.quasirandom.SobolEngine(size, scramble=True, seed=7).draw(count, dtype=torch.float64)
    return torch.special.ndtri(u.clamp(1e-6, 1 - 1e-6))


def averaged(mean: Tensor, variance: Tensor) -> Tensor:
    """E softmax of independent logits."""
    return (mean[:, None] + variance.sqrt()[:, None] * normals(64, mean.shape[1])).softmax(2).mean(1)


def mixture(process: Process, f: Tensor) -> Tensor:
    """Half about the process's own mean, half about the network's logits."""
    return 0.5 * averaged(process.mean, process.variance) + 0.5 * averaged(f, process.variance)


def left_out_logits(K: Tensor, f: Tensor) -> tuple[Tensor, float]:
    """What the network would say of an example had it not seen it (n, 16, c): a matrix normal process through its other
    logits. And R², how much of its logits the others foretell."""
    r, M = f - f.mean(0), torch.linalg.inv(K + NOISE * torch.eye(len(K)).double())
    d, a = M.diagonal(), M @ r
    e = a / d[:, None]
    B = r.mT @ a / len(f)  # covariance of classes
    values, vectors = torch.linalg.eigh(B)
    half = vectors * values.clamp_min(0).sqrt()
    draws = (normals(DRAWS, f.shape[1]) @ half.mT)[None] / d.sqrt()[:, None, None]
    return (f - e)[:, None] + draws, float(1 - e.square().sum() / r.square().sum())


def scores(logits: Tensor, y: Tensor) -> Tensor:
    """−log softmax of the label, mean over draws, (n,)."""
    return (logits.logsumexp(-1) - logits.gather(-1, y[:, None, None].expand(*logits.shape[:2], 1))[..., 0]).mean(1)


def weights(logits: list[Tensor], y: Tensor, bounds: list[tuple[float, float]]) -> list[float]:
    """argmin_w of the mean score of Σ w_i logits_i within the bounds: convex."""

    def loss(w: np.ndarray) -> tuple[float, np.ndarray]:
        v = torch.tensor(w, requires_grad=True)
        value = scores(sum(w_i * l for w_i, l in zip(v, logits, strict=True)), y).mean()
        return float(value.detach()), torch.autograd.grad(value, v)[0].numpy()

    start = [high if i == 0 else low for i, (low, high) in enumerate(bounds)]
    return minimize(loss, start, jac=True, bounds=bounds, method="L-BFGS-B").x.tolist()


def pooled(left: Tensor, f: Tensor, y: Tensor, partner: Process, T: float) -> Tensor:
    """softmax(a f + b m) where it foretells left-out labels better by two standard errors; else the network."""
    m = partner.left_mean[:, None].expand_as(left)
    a, b = weights([left, m], y, [(FLOOR / T, 1.0), (0.0, 2.0)])
    gain = scores(left, y) - scores(a * left + b * m, y)
    a, b = (a, b) if float(gain.mean()) > 2 * float(gain.std()) / len(y) ** 0.5 else (1.0, 0.0)
    return (a * f + b * partner.mean).softmax(1)


def nll(p: Tensor, y: Tensor) -> Tensor:
    """−log p of the label, (n,)."""
    return -p.gather(1, y[:, None])[:, 0].clamp_min(1e-12).log()


def left_out_nll(process: Process, y: Tensor) -> float:
    """Mean −log p of the labels, each left out."""
    return float(nll(averaged(process.left_mean, process.left_variance), y).mean())
