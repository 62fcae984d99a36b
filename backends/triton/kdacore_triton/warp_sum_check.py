"""Find, in PTX, sums over the lanes of a warp whose result differs between lanes.

A sum over lanes is a butterfly: every lane adds its neighbour's value to its own. Where its own value
is still a product, the compiler contracts both to ``fma(a, b, neighbour's)``. The neighbour does the
same with its own product, so one pair is rounded in two ways and two lanes hold different results;
when both store to shared memory, either may win. ``kernels.common.product`` prevents this.
"""

from __future__ import annotations

import re

_FILE = re.compile(r'\s*\.file\s+(\d+)\s+"([^"]+)"')
_LINE = re.compile(r"\s*\.loc\s+(\d+)\s+(\d+)")
_INSTRUCTION = re.compile(r"\s*(?:@!?%p\d+ )?([a-z][\w.:]+)\s+(%\w+)(?:\|%p\d+)?,\s*(.*);")


def contracted_warp_sums(ptx: str) -> list[str]:
    """Sums that add a neighbour's value to a product: ``file:line``, once for each instruction."""
    files = {m[1]: m[2].rsplit("/", 1)[-1] for m in map(_FILE.match, ptx.splitlines()) if m}
    made: dict[str, tuple[str, list[str]]] = {}
    where, found = "", []

    def source(x: str) -> str:
        while x in made and made[x][0].startswith("mov"):
            x = made[x][1][0]
        return x

    def is_made_by(x: str, *names: str) -> bool:
        return x in made and made[x][0].startswith(names)

    for line in ptx.splitlines():
        if m := _LINE.match(line):
            where = f"{files.get(m[1], '?')}:{m[2]}"
        elif m := _INSTRUCTION.match(line):
            name, result, given = m[1], m[2], [source(x.strip()) for x in m[3].split(",")]
            if name.startswith("fma.rn.f32") and is_made_by(given[2], "shfl.sync.bfly"):
                found.append(where)
            elif name.startswith("add") and ".f32" in name:
                theirs = [is_made_by(x, "shfl.sync.bfly") for x in given]
                product = [is_made_by(x, "mul.f32", "mul.rn.f32") for x in given]
                if (theirs[0] and product[1]) or (theirs[1] and product[0]):
                    found.append(where)  # ptxas would contract these two
            made[result] = (name, given)
    return found
