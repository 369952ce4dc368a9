"""Contiguous rows against a model of lengths and promises, on both allocators."""

from __future__ import annotations

import copy
import dataclasses
import functools
import types

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import stateful
from hypothesis import strategies as st
from jax import lax

from paged_jax.memory import buddy, contiguous, first_fit
from tests.support import allocators

ROWS, POOL, BOUND = 4, 23, 32
MODELS: dict[contiguous.Allocator, type[allocators.Model]] = {
    buddy: allocators.BuddyModel,
    first_fit: allocators.FirstFitModel,
}
reserve = jax.jit(contiguous.reserve)
fork = jax.jit(contiguous.fork)
release = jax.jit(contiguous.release)


def rows_of(values: list[int]) -> jax.Array:
    return jnp.array(values, jnp.int32)


def empty(allocator, pool_slots: int = POOL) -> contiguous.Contiguous:
    return contiguous.create(allocator=allocator, rows=ROWS, pool_slots=pool_slots, bound=BOUND)


def unchanged(before: contiguous.Contiguous, after: contiguous.Contiguous) -> bool:
    same = jax.tree.map(lambda old, new: bool((old == new).all()), before, after)
    return all(jax.tree.leaves(same))


class Verbs(stateful.RuleBasedStateMachine):
    """Any sequence of verbs; the model keeps tokens, promise and address of each live row."""

    allocator: contiguous.Allocator
    model_of: type[allocators.Model]

    def __init__(self) -> None:
        super().__init__()
        self.state = empty(self.allocator)
        self.model = self.model_of(POOL)
        self.rows: dict[int, list[int]] = {}  # row -> [tokens, promise, address]

    def begin(self, newborn: dict[int, tuple[int, int]]) -> bool:
        """Takes a chunk for each row of ``newborn``, (tokens, promise), or changes nothing."""
        model, rows = copy.deepcopy(self.model), copy.deepcopy(self.rows)
        for row, (tokens, promise) in sorted(newborn.items()):
            address = model.allocate(promise)
            if row in rows or not 0 < tokens <= promise or address is None:
                return False
            rows[row] = [tokens, promise, address]
        self.model, self.rows = model, rows
        return True

    @stateful.rule(
        tokens=st.lists(st.sampled_from([0, 0, 0, 0, 1, 3]), min_size=ROWS, max_size=ROWS),
        promises=st.lists(st.integers(2, 9), min_size=ROWS, max_size=ROWS),
        negative=st.sampled_from([False] * 9 + [True]),
    )
    def reserve(self, tokens: list[int], promises: list[int], negative: bool) -> None:
        if negative:
            tokens[0] = -1
        self.state, fits = reserve(self.state, rows_of(tokens), rows_of(promises))
        grown = {row: self.rows[row][0] + tokens[row] for row in self.rows}
        newborn = {
            row: (tokens[row], promises[row])
            for row in range(ROWS)
            if row not in self.rows and tokens[row] > 0
        }
        legal = min(tokens) >= 0 and all(grown[row] <= self.rows[row][1] for row in grown)
        assert bool(fits) == (legal and self.begin(newborn))
        for row in grown:
            self.rows[row][0] = grown[row] if fits else self.rows[row][0]

    @stateful.rule(data=st.data(), wild=st.sampled_from([False, False, True]))
    def fork(self, data: st.DataObject, wild: bool) -> None:
        every = set(range(ROWS))
        children = st.sampled_from(sorted(every if wild else every - set(self.rows) or every))
        parents = st.sampled_from(sorted(every if wild else set(self.rows) or every))
        family = data.draw(st.dictionaries(children, parents, min_size=1, max_size=2))
        self.state, copies, fits = fork(
            self.state, rows_of([family.get(row, ROWS) for row in range(ROWS)])
        )
        newborn = {row: tuple(self.rows.get(family[row], [0, 0])[:2]) for row in family}
        assert bool(fits) == self.begin(newborn)  # type: ignore[arg-type]
        for row in range(ROWS):
            run = (POOL, POOL, 0)
            if row in family and fits:
                run = (self.rows[family[row]][2], self.rows[row][2], self.rows[row][0])
            got = copies.source_B[row], copies.target_B[row], copies.tokens_B[row]
            assert tuple(map(int, got)) == run

    @stateful.rule(
        marked=st.lists(st.sampled_from([False] * 3 + [True]), min_size=ROWS, max_size=ROWS)
    )
    def release(self, marked: list[bool]) -> None:
        self.state, valid = release(self.state, jnp.array(marked))
        released = {row for row in range(ROWS) if marked[row]}
        assert bool(valid) == (released <= set(self.rows))
        for row in released if valid else ():
            self.model.release(self.rows.pop(row)[2])

    @stateful.invariant()
    def agrees(self) -> None:
        assert contiguous.faults(self.state) == []
        rows = [self.rows.get(row, [0, 0, POOL]) for row in range(ROWS)]
        fields = self.state.length_B, self.state.promised_B, self.state.address_B
        assert np.stack(fields, axis=1).tolist() == rows
        assert self.allocator.free_slots(self.state.chunks) == self.model.free_slots()

    def teardown(self) -> None:
        self.state, valid = release(self.state, self.state.length_B > 0)
        assert valid
        assert unchanged(empty(self.allocator), self.state)


def run_machine(allocator: contiguous.Allocator, model: type[allocators.Model], **settings) -> None:
    machine = type("Verbs", (Verbs,), {"allocator": allocator, "model_of": model})
    quick = hypothesis.settings(
        max_examples=60, stateful_step_count=20, deadline=None, derandomize=True, database=None
    )
    stateful.run_state_machine_as_test(machine, settings=hypothesis.settings(quick, **settings))


@pytest.mark.parametrize("allocator", MODELS)
def test_verbs_agree_with_model(allocator):
    run_machine(allocator, MODELS[allocator])


@pytest.mark.parametrize(
    "fault",
    [
        {"free": lambda state, address: (state, address >= 0)},
        {"allocate": lambda state, slots: first_fit.allocate(state, slots + 1)},
        {"allocate": lambda state, slots: (*first_fit.allocate(state, slots)[:2], slots > 0)},
    ],
    ids=["frees nothing", "takes a slot more", "always fits"],
)
def test_mutants_disagree_with_model(fault):
    mutant = types.ModuleType("mutant")
    vars(mutant).update(vars(first_fit) | fault)
    settings = {"phases": [hypothesis.Phase.generate], "report_multiple_bugs": False}
    with pytest.raises(AssertionError):
        run_machine(mutant, allocators.FirstFitModel, **settings)


@pytest.mark.parametrize(
    "mutate",
    [
        lambda state: state.replace(address_B=state.address_B.at[1].add(-1)),
        lambda state: state.replace(address_B=state.address_B.at[1].add(POOL)),
        lambda state: state.replace(length_B=state.length_B + 9),
        lambda state: state.replace(length_B=state.length_B.at[1].set(0)),
        lambda state: state.replace(chunks=buddy.create(POOL, BOUND)),
    ],
    ids=["overlap", "outside", "too long", "lost", "leaked"],
)
def test_faults_are_found(mutate):
    state, fits = reserve(empty(buddy), rows_of([1, 1, 0, 0]), rows_of([4, 4, 0, 0]))
    assert fits
    assert contiguous.faults(state) == []
    assert contiguous.faults(mutate(state)) != []


@pytest.mark.parametrize("allocator", MODELS)
def test_refused_reserve_leaves_no_trace(allocator):
    state, fits = reserve(empty(allocator), rows_of([3, 0, 0, 0]), rows_of([5, 0, 0, 0]))
    assert fits
    # Rows 1 and 2 could begin, row 3 could not: all are refused, and so is row 0's growth.
    after, fits = reserve(state, rows_of([1, 1, 1, 1]), rows_of([0, 3, 3, 13]))
    assert not fits
    assert unchanged(state, after)


def test_fork_of_a_part_with_its_own_promise():
    state, _ = reserve(empty(first_fit), rows_of([5, 0, 0, 0]), rows_of([6, 0, 0, 0]))
    parents, promises = rows_of([4, 0, 4, 4]), rows_of([0, 9, 0, 0])
    state, copies, fits = fork(state, parents, rows_of([0, 2, 0, 0]), promises)
    assert fits
    assert (state.length_B[1], state.promised_B[1]) == (2, 9)
    assert (copies.source_B[1], copies.target_B[1], copies.tokens_B[1]) == (0, 6, 2)
    assert not fork(state, rows_of([4, 4, 0, 4]), rows_of([0, 0, 6, 0]))[2]  # row 0 stores 5
    assert not fork(state, rows_of([4, 4, -1, 4]))[2]


def test_scan_over_steps_under_vmap_over_pools():
    pools = (8, 16, 31)
    states = [empty(buddy, pool_slots) for pool_slots in pools]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *states)

    def step(state, _):
        return contiguous.reserve(state, rows_of([2, 2, 0, 1]), rows_of([8, 8, 8, 8]))

    run = jax.jit(jax.vmap(functools.partial(lax.scan, step, xs=None, length=5)))
    state, fits = run(stacked)
    assert fits.tolist() == [[False] * 5, [False] * 5, [True] * 4 + [False]]
    assert state.length_B.tolist() == [[0] * 4, [0] * 4, [8, 8, 0, 4]]


def test_promises():
    prompt, output = np.array([10, 10, 1, 2000]), np.array([25, 32, 1, 33])
    expected = {"max": [2048] * 4, "pow2": [42, 42, 2, 2048], "oracle": [35, 42, 2, 2033]}
    for kind in contiguous.KINDS:
        rule = functools.partial(contiguous.promise, kind, max_length=2048)
        assert rule(prompt, output).tolist() == expected[kind]
        assert jax.jit(rule)(prompt, output).tolist() == expected[kind]
        assert rule(10, 25) == expected[kind][0]
    with pytest.raises(ValueError, match="expected one of max, pow2, oracle, got 'best'"):
        contiguous.promise("best", 1, 1, 2048)


def test_long_prompts_cost_all_baselines_the_same():
    """PagedAttention paper, section 6.5: chat prompts of 1024 tokens make the baselines equal."""
    output = np.arange(1, 1025)
    for kind in contiguous.KINDS:
        chunk = buddy.chunk_slots(contiguous.promise(kind, 1024, output, 2048))
        assert set(np.asarray(chunk)) == {2048}


def test_create_refuses():
    with pytest.raises(ValueError, match="rows: expected at least 1, got 0"):
        contiguous.create(allocator=buddy, rows=0, pool_slots=8)


@pytest.mark.parametrize(
    ("allocator", "round_up"), [(buddy, 64 - 40 + 16 - 12), (first_fit, 0)], ids=["buddy", "first"]
)
def test_ledger_by_hand(allocator, round_up):
    """Chunks for promises of 40 and 12: 7 and 12 tokens stored, 25 and 12 in the end."""
    state = contiguous.create(allocator=allocator, rows=3, pool_slots=100)
    promise_B = jnp.array([40, 12, 0], jnp.int32)
    state, fits = contiguous.reserve(state, jnp.array([7, 12, 0], jnp.int32), promise_B)
    assert fits
    final_B = jnp.array([25, 12, 0], jnp.int32)
    free = 100 - 40 - 12 - round_up
    expected = {"token": 19, "reserved": 25 - 7, "internal": 40 - 25, "round_up": round_up}
    for reason in ("free", "short", "stranded"):
        reasons = {name: name == reason for name in ("short", "stranded")}
        ledger = dataclasses.asdict(contiguous.ledger(state, final_B, **reasons))
        wanted = {name: 0 for name in ledger} | expected | {reason: free}
        assert {name: int(slots) for name, slots in ledger.items()} == wanted
        assert sum(wanted.values()) == 100
