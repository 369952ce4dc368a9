"""Static cycle counts of a TPU kernel, from the VLIW bundles that the compiler dumps.

A bundle issues in one cycle, so a loop costs its bundles, plus for each loop inside it that loop's
bundles times its trips; stalls and the speed of copies are not in a static count. Depth is marked
in the listing by one ``>`` a level, but an empty bundle carries no mark and the slots behind a
branch may carry either side's, hence a loop ends before the first bundle that is marked less deep
after its last branch back. ``Cost.bundles`` counts every bundle of a body, those of rare work
(a row's last tile, the search for its next) too; ``Cost.steady`` is the way of all other trips.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence

GRANULE_BYTES = 32  # the unit in which a copy states its size

_BUNDLE = re.compile(r"^ *(0x[0-9a-f]+|0) +(LB|LH|LE|PB|PF|CT)? *: *(>*) *\{(.*)$")
_STARTS = re.compile(r"Start(?:/End empty)? region (\d+)")
_BRANCH = re.compile(r"sbr\.rel (?:\((!?%p\w+)\) )?target = \$region(\d+)")
_COPY = re.compile(r"= dma\.hbm_to_vmem \[thread:\S+\].*?/\*size_in_granules=\*/(\d+)", re.DOTALL)
_MATMUL = re.compile(r"\bvmatmul")
_VMEM = re.compile(r"space=vmem, size = (0x[0-9a-f]+|\d+), (?!.*fixed_abs)")


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """One line of the listing, or several where a comment in it spans lines."""

    address: int
    loops: bool  # whether a loop's body begins here
    depth: int | None  # None: an empty bundle, which carries no mark
    text: str

    @property
    def regions(self) -> set[str]:
        """The regions that start here: what branches name as their target."""
        return set(_STARTS.findall(self.text))

    @property
    def branch(self) -> tuple[str | None, str] | None:
        """(predicate, region) of the bundle's branch."""
        found = _BRANCH.search(self.text)
        return (found[1], found[2]) if found else None

    @property
    def copied_bytes(self) -> int:
        """Bytes whose copy from HBM to VMEM begins here."""
        return sum(GRANULE_BYTES * int(size) for size in _COPY.findall(self.text))

    @property
    def multiplies(self) -> bool:
        """Whether the bundle feeds a matrix unit."""
        return bool(_MATMUL.search(self.text))


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop's bundles, those of the loops inside it among them."""

    bundles: tuple[Bundle, ...]
    inner: tuple[Loop, ...]
    trips: int | None  # None: not a constant of the program

    @property
    def first(self) -> int:
        return self.bundles[0].address

    @property
    def last(self) -> int:
        return self.bundles[-1].address

    def own(self) -> Iterator[Bundle]:
        """The bundles that no loop inside holds."""
        for bundle in self.bundles:
            if not any(loop.first <= bundle.address <= loop.last for loop in self.inner):
                yield bundle


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """Bundles of one trip of a loop."""

    bundles: int  # every bundle of the body
    steady: int  # on the shortest way that multiplies most and copies what a trip has to
    copied_bytes: int  # on that way
    assumed: int  # loops inside whose trips are unknown, counted once


def parse(listing: str) -> Loop:
    """The program of a ``*-final_bundles.txt`` as a loop of one trip.

    Raises ``ValueError`` for a listing without bundles and for a loop without a branch back.
    """
    lines = listing.splitlines()
    starts = [(index, found) for index, line in enumerate(lines) if (found := _BUNDLE.match(line))]
    bundles = []
    for nth, (index, found) in enumerate(starts):
        end = starts[nth + 1][0] if nth + 1 < len(starts) else len(lines)
        text = "\n".join([found[4], *lines[index + 1 : end]])
        depth = None if text.startswith("}") else len(found[3])
        bundles.append(Bundle(int(found[1], 16), found[2] == "LB", depth, text))
    if [bundle.address for bundle in bundles] != list(range(len(bundles))) or not bundles:
        raise ValueError("bundles: expected a listing of bundles at addresses 0, 1, 2 and so on")
    return Loop(tuple(bundles), _inner(bundles, bundles), 1)


def main_loop(program: Loop) -> Loop:
    """The innermost loop that both copies from HBM and multiplies, loops inside it included.

    Raises ``ValueError`` where no loop does both.
    """

    def serves(loop: Loop) -> bool:
        return any(bundle.copied_bytes for bundle in loop.bundles) and any(
            bundle.multiplies for bundle in loop.bundles
        )

    chosen = None
    candidates = [loop for loop in program.inner if serves(loop)]
    while candidates:
        chosen = max(candidates, key=lambda loop: len(loop.bundles))
        candidates = [loop for loop in chosen.inner if serves(loop)]
    if chosen is None:
        raise ValueError("bundles: no loop copies from HBM and multiplies")
    return chosen


def cost(loop: Loop, trip_bytes: int) -> Cost:
    """What one trip costs, if it copies ``trip_bytes`` from HBM in all.

    A loop inside of unknown length that copies runs as often as that takes.
    """
    own = list(loop.own())
    left = trip_bytes - sum(bundle.copied_bytes for bundle in own)
    inner: dict[int, tuple[int, Cost]] = {}
    assumed = 0
    for child in loop.inner:
        child_bytes = sum(bundle.copied_bytes for bundle in child.bundles)
        trips = child.trips
        if trips is None and child_bytes:
            trips = max(1, round(left / child_bytes))
        spent = cost(child, child_bytes)
        assumed += (trips is None) + spent.assumed
        inner[child.first] = (trips or 1, spent)
    steady, copied_bytes = _steady(loop, inner, trip_bytes)
    nested = sum(trips * spent.bundles for trips, spent in inner.values())
    return Cost(len(own) + nested, steady, copied_bytes, assumed)


def vmem_bytes(allocations: str) -> int:
    """Bytes of VMEM that a ``*-pre-finalize-registers-and-allocations.txt`` lists for a kernel."""
    return sum(int(size, 0) for size in _VMEM.findall(allocations))


def _steady(loop: Loop, inner: dict[int, tuple[int, Cost]], trip_bytes: int) -> tuple[int, int]:
    """(bundles, copied bytes) of the shortest way through a body that does a trip's work.

    ``best[address]`` maps the bytes copied before it to (multiplications missed, bundles), so
    that the smallest pair multiplies most and, among those ways, is the shortest.
    """
    target = {region: bundle.address for bundle in loop.bundles for region in bundle.regions}
    length = {child.first: len(child.bundles) for child in loop.inner}
    best: dict[int, dict[int, tuple[int, int]]] = {loop.first: {0: (0, 0)}}

    def reach(address: int, copied: int, spent: tuple[int, int]) -> None:
        ways = best.setdefault(address, {})
        ways[copied] = min(spent, ways.get(copied, spent))

    for bundle in loop.bundles:
        address = bundle.address
        for copied, (missed, bundles) in best.get(address, {}).items():
            if address in inner:
                trips, spent = inner[address]
                new = (missed, bundles + trips * spent.steady)
                reach(address + length[address], copied + trips * spent.copied_bytes, new)
                continue
            copied += bundle.copied_bytes
            reach(address + 1, copied, (missed, bundles + 1))
            jump = target.get(bundle.branch[1], -1) if bundle.branch else -1
            if jump > address:
                over = loop.bundles[address + 1 - loop.first : jump - loop.first]
                skipped = sum(passed.multiplies for passed in over)
                reach(jump, copied, (missed + skipped, bundles + 1))
    ends = best[loop.last + 1]
    copied = min(ends, key=lambda copied: (abs(copied - trip_bytes), ends[copied]))
    return ends[copied][1], copied


def _inner(
    bundles: Sequence[Bundle], program: Sequence[Bundle], depth: int = 0
) -> tuple[Loop, ...]:
    """The outermost loops among ``bundles``, which lie at ``depth``."""
    found = []
    index = 0
    while index < len(bundles):
        head_depth = _depth(bundles, index) if bundles[index].loops else depth
        if head_depth > depth:
            end = _end(bundles, index, head_depth)
            body = bundles[index:end]
            inner = _inner(body, program, head_depth)
            found.append(Loop(tuple(body), inner, _trips(body, program)))
            index = end
        else:
            index += 1
    return tuple(found)


def _depth(bundles: Sequence[Bundle], index: int) -> int:
    """The depth of a bundle, that of the next one with a mark where it has none."""
    return next((one.depth for one in bundles[index:] if one.depth is not None), 0)


def _end(bundles: Sequence[Bundle], start: int, depth: int) -> int:
    """The index after a loop of a depth that begins at index ``start``."""
    head = bundles[start]
    back = [
        index
        for index in range(start, len(bundles))
        if (branch := bundles[index].branch) and branch[1] in head.regions
    ]
    if not back:
        raise ValueError(f"bundles: the loop at {head.address:#x} has no branch back")
    end = back[-1] + 1
    while end < len(bundles):
        marked = bundles[end].depth
        if marked is not None and marked < depth:
            break
        end += 1
    return end


def _trips(body: Sequence[Bundle], program: Sequence[Bundle]) -> int | None:
    """Trips of a loop that counts from a constant by a constant to a constant, else None."""
    branches = [
        bundle.branch for bundle in body if bundle.branch and bundle.branch[1] in body[0].regions
    ]
    if len(branches) != 1 or branches[0][0] is None:
        return None
    test = _define(body, branches[0][0].lstrip("!"), r"scmp\.ge\.s32\.totalorder (%s\w+), (\d+)")
    step = test and _define(body, test[0], r"sadd\.s32 (\d+), (%s\w+)")
    phi = step and _define(body, step[1], r"sphi (%s\w+), %s\w+")
    start = phi and _define(program, phi[0], r"smov (?:\(!?%p\w+\), )?(\d+)")
    if not (test and step and start):
        return None
    return -(-(int(test[1]) - int(start[0])) // int(step[0]))


def _define(bundles: Sequence[Bundle], name: str, pattern: str) -> tuple[str, ...] | None:
    """The operands of ``name``'s definition, if it has the form of ``pattern``."""
    wanted = re.compile(re.escape(name) + r" = " + pattern + r"(?![\w.])")
    for bundle in bundles:
        if found := wanted.search(bundle.text):
            return found.groups()
    return None
