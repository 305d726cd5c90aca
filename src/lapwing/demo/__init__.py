"""The demo: MAP against Laplace on real data, as `make demo` and `lapwing demo` run it (the extra `demo`)."""
