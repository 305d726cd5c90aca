"""A bar over the steps of a search, with the value that it has come to; silent unless asked for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tqdm.auto import tqdm

Watch = Callable[[float], None]


def unwatched(value: float) -> None:
    """Of a search that nobody watches."""


@contextmanager
def watched(progress: bool, what: str = "log evidence") -> Iterator[Watch]:
    """A function to call with the value at each step."""
    with tqdm(desc="tuning", unit=" steps", disable=not progress, leave=False) as bar:

        def step(value: float) -> None:
            bar.set_postfix_str(f"{what} {value:.6g}", refresh=False)
            bar.update()

        yield step
