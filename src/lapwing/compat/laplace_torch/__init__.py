"""laplace-torch's calls on Lapwing: `from lapwing.compat.laplace_torch import Laplace, marglik_training`."""

from lapwing.compat.laplace_torch.laplace import Laplace

__all__ = ["Laplace"]
