"""Networks of infinite width: kernels in closed form, and Gaussian processes of them."""

from lapwing.gp.infinite.kernel import Kernel, nngp, ntk
from lapwing.gp.infinite.reading import Residual, of, register
from lapwing.gp.infinite.regression import Regression

__all__ = ["Kernel", "Regression", "Residual", "nngp", "ntk", "of", "register"]
