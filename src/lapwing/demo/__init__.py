"""The demo: MAP against Laplace on real data, as `make demo` and `lapwing demo` run it (the extra `demo`)."""

try:
    import matplotlib as _matplotlib  # noqa: F401
    import sklearn as _sklearn  # noqa: F401
except ImportError as error:
    raise ImportError(f"the demo needs {error.name}, which is not installed; pip install 'lapwing[demo]'") from error
