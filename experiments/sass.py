"""Registers, residence and issue slots of a GPU kernel, from ptxas's report and nvdisasm's listing.

An instruction takes one of a scheduler's issue slots. Loops are natural loops of the control flow
graph and not ranges of addresses: the compiler moves the retries of a barrier's wait to the end of
the kernel, from where they jump back into the loop. Such a retry loop is entered only when data is
late, so it is left out of the loop around it. A warpgroup is one warp on each of an SM's four
schedulers; consumer and producer share them, hence their slots add up.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

SCHEDULERS = 4  # of an SM
WARP = 32
SM_REGISTERS = 65_536
SM_THREADS = 2_048
SM_CTAS = 32
SM_SMEM = 233_472  # bytes
RESERVED_SMEM = 1_024  # of every CTA
REGISTER_UNIT = 256  # a warp's registers are rounded up to it
SMEM_UNIT = 128

TENSOR = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "QMMA")
COPY = ("UTMALDG", "LDGSTS")
JUMPS = ("BRA", "BRX")  # a call comes back, so it is no jump here
EXPONENTIAL = ("MUFU.EX2",)

_INSTRUCTION = re.compile(r"/\*([0-9a-f]{4,})\*/ +(?:@(!?U?P\w+) +)?([A-Z][\w.]*)(.*)")
_LABEL = re.compile(r"^(\.L_x_\d+|\w+):")
_TARGET = re.compile(r"`\((\.L_x_\d+)\)")
_REPORT = {
    "registers": r"Used (\d+) registers",
    "stores": r"(\d+) bytes spill stores",
    "loads": r"(\d+) bytes spill loads",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """What ptxas says a kernel needs."""

    registers: int  # a thread's
    spilled_bytes: int  # stored and loaded
    static_smem: int  # bytes


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    address: int
    predicate: str | None
    name: str
    target: str | None  # label that it jumps to

    def is_one_of(self, names: Sequence[str]) -> bool:
        return self.name.startswith(tuple(names))


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A natural loop without the instructions of the loops inside it."""

    head: int  # address of its first instruction
    own: tuple[Instruction, ...]
    inner: tuple[Loop, ...]

    def count(self, names: Sequence[str]) -> int:
        """Instructions in the loop, those of the loops inside included, that begin with a name."""
        return _own_count(self, names) + sum(loop.count(names) for loop in self.inner)


@dataclasses.dataclass(frozen=True, slots=True)
class Main:
    """The loops in which a kernel spends its time, one for each kind of warp."""

    steady: Loop  # of the consumer
    longest: Loop  # of the consumer, where some steps need more, a mask say; else the same
    producer: Loop | None  # None: the consumer copies for itself
    copies: int  # instructions that copy, in all loops of all warps


def read_report(text: str) -> Report:
    """The figures of ``ptxas -v`` for one kernel; ``ValueError`` where one is not there."""
    found = {}
    for name, pattern in _REPORT.items():
        numbers = re.findall(pattern, text)
        if len(numbers) != 1:
            raise ValueError(f"ptxas: expected one line of {pattern!r}, found {len(numbers)}")
        found[name] = int(numbers[0])
    smem = re.search(r"Used \d+ registers.* (\d+) bytes smem", text)
    return Report(found["registers"], found["stores"] + found["loads"], int(smem[1]) if smem else 0)


def ctas_per_sm(registers: int, threads: int, smem: int) -> int:
    """CTAs of ``smem`` bytes, static and dynamic, that an SM of a GH200 or H200 holds at a time."""
    warps = -(-threads // WARP)
    warp_registers = -(-registers * WARP // REGISTER_UNIT) * REGISTER_UNIT
    warps_fitting = SM_REGISTERS // SCHEDULERS // warp_registers * SCHEDULERS
    cta_smem = -(-(smem + RESERVED_SMEM) // SMEM_UNIT) * SMEM_UNIT
    return min(warps_fitting // warps, SM_SMEM // cta_smem, SM_THREADS // threads, SM_CTAS)


def parse(listing: str) -> tuple[Loop, ...]:
    """The outermost loops of a kernel, in the order of their addresses.

    Raises ``ValueError`` for a listing without instructions and for a jump to an unknown label.
    """
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in listing.splitlines():
        if found := _INSTRUCTION.search(line):
            jump = _TARGET.search(found[4]) if found[3].startswith(JUMPS) else None
            target = jump[1] if jump else None
            instructions.append(Instruction(int(found[1], 16), found[2], found[3], target))
        elif found := _LABEL.match(line):
            labels[found[1]] = len(instructions)
    if not instructions:
        raise ValueError("sass: expected a listing of instructions")
    unknown = [one.target for one in instructions if one.target and one.target not in labels]
    if unknown:
        raise ValueError(f"sass: no label {unknown[0]} in the listing")
    return _loops(instructions, labels)


def main_loops(loops: Sequence[Loop], copies: int = 1) -> Main:
    """The innermost loops that multiply, and that copy only.

    Of those that multiply as much, one is for steps without a mask: the shortest. A producer's loop
    with fewer than a trip's ``copies`` runs over blocks if there is a loop around it, which then is
    meant, and is one warp's share if there is none. Raises ``ValueError`` if no loop multiplies.
    """
    every = list(_walk(loops))
    most = max((_own_count(loop, TENSOR) for loop in every), default=0)
    if most == 0:
        raise ValueError("sass: no loop multiplies")
    consumers = [loop for loop in every if _own_count(loop, TENSOR) == most]
    steady = min(consumers, key=lambda loop: len(loop.own))
    longest = max(consumers, key=lambda loop: len(loop.own))
    if here := steady.count(COPY):
        return Main(steady, longest, None, here)
    copying = [loop for loop in every if not loop.count(TENSOR)]
    shares = [loop for loop in copying if _own_count(loop, COPY)]
    producer = max(shares, key=lambda loop: (loop.count(COPY), len(loop.own)), default=None)
    around = next((loop for loop in copying if producer in loop.inner), None)
    if producer and around and producer.count(COPY) < copies:
        producer = around
    return Main(steady, longest, producer, sum(_own_count(loop, COPY) for loop in shares))


def slots(loop: Loop, copies: int = 0) -> int:
    """Issue slots that one trip takes of each scheduler, for one warp on it.

    A loop inside that neither multiplies nor copies waits, and is left out. One that copies runs as
    often as the trip's ``copies`` take, at least once.
    """
    total = len(loop.own)
    done = _own_count(loop, COPY)
    for child in loop.inner:
        per_trip = child.count(COPY)
        if per_trip or child.count(TENSOR):
            left = max(1, (copies - done) // per_trip) if per_trip else 1
            total += slots(child) * left
    return total


def _own_count(loop: Loop, names: Sequence[str]) -> int:
    return sum(one.is_one_of(names) for one in loop.own)


def _walk(loops: Iterable[Loop]) -> Iterable[Loop]:
    for loop in loops:
        yield loop
        yield from _walk(loop.inner)


def _loops(instructions: Sequence[Instruction], labels: Mapping[str, int]) -> tuple[Loop, ...]:
    """Natural loops: for a jump back to a head that dominates it, all that reaches the jump."""
    successors = [_after(index, instructions, labels) for index in range(len(instructions))]
    predecessors: list[list[int]] = [[] for _ in instructions]
    for index, after in enumerate(successors):
        for target in after:
            predecessors[target].append(index)
    dominator = _dominators(successors, predecessors)
    bodies: dict[int, set[int]] = {}
    for index, after in enumerate(successors):
        for head in after:
            if index in dominator and _dominates(head, index, dominator):
                bodies.setdefault(head, {head}).update(_reaching(index, head, predecessors))
    return _nest(bodies, instructions)


def _after(index: int, instructions: Sequence[Instruction], labels: Mapping[str, int]) -> list[int]:
    one = instructions[index]
    after = []
    if one.target is not None:
        after.append(labels[one.target])
    # BRA.U takes its condition, a uniform predicate, as an operand: it may fall through.
    leaves = one.name in ("EXIT", "RET", "BRA") or one.name.startswith(("RET.", "BRX"))
    if one.predicate is not None or not leaves:
        after.append(index + 1)
    return [target for target in after if target < len(instructions)]


def _dominators(
    successors: Sequence[Sequence[int]], predecessors: Sequence[Sequence[int]]
) -> dict[int, int]:
    """Immediate dominators of what the first instruction reaches (Cooper, Harvey and Kennedy)."""
    order: list[int] = []
    seen = {0}
    stack = [(0, iter(successors[0]))]
    while stack:
        node, rest = stack[-1]
        child = next(rest, None)
        if child is None:
            order.append(node)
            stack.pop()
        elif child not in seen:
            seen.add(child)
            stack.append((child, iter(successors[child])))
    rank = {node: place for place, node in enumerate(order)}
    dominator = {0: 0}
    changed = True
    while changed:
        changed = False
        for node in reversed(order[:-1]):
            known = [before for before in predecessors[node] if before in dominator]
            best = known[0]
            for other in known[1:]:
                while best != other:
                    if rank[best] < rank[other]:
                        best = dominator[best]
                    else:
                        other = dominator[other]
            if dominator.get(node) != best:
                dominator[node] = best
                changed = True
    return dominator


def _dominates(head: int, node: int, dominator: Mapping[int, int]) -> bool:
    while node != head and node != 0:
        node = dominator[node]
    return node == head


def _reaching(last: int, head: int, predecessors: Sequence[Sequence[int]]) -> set[int]:
    """What reaches ``last`` without passing ``head``."""
    found = {last, head}
    stack = [last] if last != head else []
    while stack:
        for before in predecessors[stack.pop()]:
            if before not in found:
                found.add(before)
                stack.append(before)
    return found


def _nest(bodies: Mapping[int, set[int]], instructions: Sequence[Instruction]) -> tuple[Loop, ...]:
    """Loops by inclusion: two loops are apart, or one lies in the other."""
    by_size = sorted(bodies.items(), key=lambda item: len(item[1]))
    pending: dict[int, Loop] = {}
    for head, body in by_size:
        inner = {child: loop for child, loop in pending.items() if child in body}
        inside = set().union(*(bodies[child] for child in inner))
        own = tuple(instructions[index] for index in sorted(body - inside))
        for child in inner:
            del pending[child]
        loops = tuple(inner[child] for child in sorted(inner))
        pending[head] = Loop(instructions[head].address, own, loops)
    return tuple(pending[head] for head in sorted(pending))
