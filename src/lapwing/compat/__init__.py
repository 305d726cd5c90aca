"""The calls of other libraries, on this one: `laplace_torch`."""
