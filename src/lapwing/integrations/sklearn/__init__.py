"""Networks with error bars as scikit-learn's estimators (pip install 'lapwing[sklearn]'): see docs/guide/sklearn.md."""

try:
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError("this needs scikit-learn, which is not installed; pip install 'lapwing[sklearn]'") from error

from lapwing.integrations.sklearn.estimators import LaplaceClassifier, LaplaceRegressor

__all__ = ["LaplaceClassifier", "LaplaceRegressor"]
