"""How a network is cut into parts where no data are at hand to prove it on, as when a saved state is loaded."""

from __future__ import annotations

from dataclasses import replace

from lapwing.curvature import Part
from lapwing.curvature.cover import candidates
from lapwing.curvature.layered import Layered
from lapwing.tangent import TangentModel


def parts_of(structure: Layered, tangent: TangentModel) -> tuple[Part, ...]:
    """Each layer as its rule sees it, and each parameter that no rule speaks for, in the order of the network."""
    found, reasons = candidates(tangent)
    claimed = {name for part in found for name in part.parameters}
    rest = [name for name in tangent.layout.names if name not in claimed]
    numel = tangent.layout.numel
    found += [Part(n, "", n, None, (1, 1, numel(n)), generic=True, reason=reasons.get(n, "")) for n in rest]
    order = {name: place for place, name in enumerate(tangent.layout.names)}
    found.sort(key=lambda part: order[part.parameters[0]])
    return tuple(replace(part, kind=structure.kind_of(part)) for part in found)
