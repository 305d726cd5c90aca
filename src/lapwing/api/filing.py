"""What of a Laplace object goes into a file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lapwing import io
from lapwing.calibration import pack

if TYPE_CHECKING:
    from lapwing.api.object import Laplace


def packed(la: Laplace, path: Any) -> io.Content:
    """Tensors and a header, which are seen to be such as could be read again."""
    tensors, header = io.pack_state(la.state)
    more, objects = io.pack_objects(la.prior, la.likelihood, la.tuning)
    held = None if la.center == "map" else la.tangent_map if la.center == "tangent" else la.process_map
    found, center = io.pack_center(held)
    if la.streams:
        samples, solved = io.pack_samples(la.spread.precision)
        found, center = found | samples, center | solved
    extra = {
        "schema": io.SCHEMA,
        "kind": "laplace",
        "center": la.center,
        "memory_budget": la.memory_budget,
        "forward_hook": la.tangent.custom_forward,
        "temperature": la.temperature,
        "mean": la.mean,
    }
    chosen, calibration = pack(la.calibration)
    aside, process = io.pack_center(la.process_at, "process")
    tensors = tensors | more | found | chosen | aside
    header = header | objects | center | extra | calibration | process
    io.check_writable(tensors, header, path)
    return tensors, header
