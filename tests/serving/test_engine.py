"""The engine: whatever comes, goes or is preempted, a request draws what it draws alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from paged_jax.config import EngineConfig
from paged_jax.decoding.sampling import SamplingParams
from paged_jax.memory import block_table
from paged_jax.serving.engine import Engine
from paged_jax.serving.llm import LLM
from paged_jax.serving.requests import Request, Sequence
from tests.support import decoder as definition
from tests.support import engines, models

DRAWN = engines.KINDS[1]
LOADS = {"chunks": {"prompt": 20, "output": 11}, "whole": {"prompt": 14, "output": 11}}


def seated(engine: Engine) -> set[Request]:
    return {held[0] for held in engine._row if held}


def preempted(engine: Engine) -> set[Request]:
    """Requests that have begun and wait."""
    return {one for one in engine._slots if one and one.begun} - seated(engine)


def order(request: Request) -> tuple[int, int]:
    return request.priority, request.number


@pytest.mark.parametrize("name", LOADS)
def test_preempted_requests_draw_as_if_alone(name: str) -> None:
    whole: dict[str, Any] = {"chunked_prefill": False, "step_tokens": 24}
    engine = engines.create(**(whole if name == "whole" else {}))
    requests = [engine.add(*one) for one in engines.random_requests(3, 30, **LOADS[name])]
    resumed: set[Request] = set()
    while engine.busy:
        engine.advance()
        resumed |= preempted(engine)
        assert block_table.faults(engine.cache.table) == []
    engines.check_empty(engine)
    assert engine.preemptions >= len(resumed) > 3
    assert {one.params.n for one in resumed} == {1, 3}
    if name == "chunks":
        assert any(len(one.prompt_ids) > engine.config.step_tokens for one in requests)
    for request in requests:
        assert engines.as_alone(request), request.number
        assert all(one.finish_reason == "length" for one in request.sequences)


def test_requests_join_while_others_run() -> None:
    engine = engines.create()
    load = engines.random_requests(5, 16, prompt=10, output=11)
    requests = []
    while load or engine.busy:
        if load:
            requests.append(engine.add(*load.pop()))
            before = seated(engine)
        engine.advance()
        if len(requests) == 2:
            assert before == {requests[0]}
            assert seated(engine) == {*requests}
    engines.check_empty(engine)
    assert all(map(engines.as_alone, requests))


def waits_in_the_queue(engine: Engine, request: Request) -> bool:
    return request in engine._queue


def waits_in_a_slot(engine: Engine, request: Request) -> bool:
    return request in engine._slots and request not in seated(engine) and not request.begun


def computes_its_prompt(engine: Engine, request: Request) -> bool:
    stored = np.asarray(engine.cache.table.length_B)[[row_of(engine, request)]]
    return 0 < int(stored[0]) < len(request.prompt_ids)


def decodes(engine: Engine, request: Request) -> bool:
    return len(request.sequences[-1].token_ids) > 2 and request in seated(engine)


def is_preempted(engine: Engine, request: Request) -> bool:
    return request in preempted(engine)


def row_of(engine: Engine, request: Request) -> int:
    """A request's first row, or the last of all."""
    rows = [row for row, held in enumerate(engine._row) if held and held[0] is request]
    return min(rows, default=-1)


STAGES: tuple[tuple[Callable[[Engine, Request], bool], int, int], ...] = (
    (waits_in_the_queue, 20, 5),  # requests before it, and its prompt
    (waits_in_a_slot, 9, 5),
    (computes_its_prompt, 2, 13),
    (decodes, 2, 5),
    (is_preempted, 5, 5),
)


def reach(
    stage: Callable[[Engine, Request], bool], before: int, prompt: int
) -> tuple[Engine, Request, list[Request]]:
    """An engine whose request of three samples has reached a stage, and those beside it."""
    engine = engines.create()
    load = engines.random_requests(7, before + 4, prompt=6, output=11)
    load = [(ids, dataclasses.replace(one, max_tokens=11)) for ids, one in load]
    others = [engine.add(*one) for one in load[:before]]
    params = dataclasses.replace(DRAWN, n=3, max_tokens=16 - prompt, seed=77)
    victim = engine.add([*range(prompt)], params)
    others += [engine.add(*one) for one in load[before:]]
    for _ in range(200):
        if stage(engine, victim):
            return engine, victim, others
        engine.advance()
    pytest.fail(f"{stage.__name__} was never reached")


@pytest.mark.parametrize(("stage", "before", "prompt"), STAGES)
def test_aborting_frees_all_and_disturbs_nobody(stage, before, prompt) -> None:
    engine, victim, others = reach(stage, before, prompt)
    drawn = engines.tokens_of(victim)
    engine.abort(victim)
    engine.abort(victim)
    assert victim not in engine._queue + engine._slots
    check_rows(engine)
    while not any(one.finished for one in others):
        engine.advance()
    ended = next(one for one in others if one.finished)
    engine.abort(ended)
    assert {one.finish_reason for one in ended.sequences} == {"length"}
    engines.finish(engine)
    assert all(map(engines.as_alone, others))
    assert engines.tokens_of(victim) == drawn
    assert {one.finish_reason for one in victim.sequences} == {"abort"}
    whole = engines.alone(tuple(victim.prompt_ids), victim.params)
    assert [one[: len(part)] for one, part in zip(whole, drawn, strict=True)] == drawn


@pytest.mark.parametrize("index", [0, 2])
@pytest.mark.parametrize(("stage", "before", "prompt"), STAGES[1:])
def test_stopping_one_sample_keeps_its_siblings(stage, before, prompt, index) -> None:
    engine, victim, others = reach(stage, before, prompt)
    stopped = victim.sequences[index]
    kept = stopped.token_ids[:1]
    engine.stop(victim, stopped, len(kept))
    check_rows(engine)
    engines.finish(engine)
    assert all(map(engines.as_alone, others))
    expected = [*engines.alone(tuple(victim.prompt_ids), victim.params)]
    expected[index] = kept
    assert engines.tokens_of(victim) == expected
    assert stopped.finish_reason == "stop"


def check_rows(engine: Engine) -> None:
    """Rows that nobody sits in hold nothing, and all blocks are accounted for."""
    table = engine.cache.table
    assert block_table.faults(table) == []
    empty_B = np.array([held is None for held in engine._row])
    assert not np.asarray(table.length_B)[empty_B].any()


def test_the_lowest_number_is_served_first_and_preempted_last() -> None:
    engine = engines.create()
    load = engines.random_requests(9, 40, prompt=6, output=11)
    priorities = np.random.default_rng(9).integers(-2, 3, len(load)).tolist()
    requests = [
        engine.add(*one, priority=priority) for one, priority in zip(load, priorities, strict=True)
    ]
    served: list[Request] = []
    while engine.busy:
        engine.advance()
        running, begun = seated(engine), {one for one in requests if one.begun}
        new = sorted((running | begun) - {*served}, key=order)
        assert not served or not new or order(served[-1]) < order(new[0])
        served += new
        for victim in preempted(engine):
            assert all(order(one) < order(victim) for one in running)
    assert served == sorted(requests, key=order)
    assert engine.preemptions > 3
    assert all(map(engines.as_alone, requests))


def test_who_comes_late_with_a_lower_number_passes_all_that_wait() -> None:
    """All slots are taken when they come, and one request's end makes room for several."""
    engine = engines.create()
    low = [
        engine.add([n, n], dataclasses.replace(DRAWN, n=3 if n < 2 else 1, max_tokens=4 + n))
        for n in range(13)
    ]
    engine.advance()
    assert all(engine._slots)
    assert engine._queue
    high = [
        engine.add([9, n], dataclasses.replace(DRAWN, max_tokens=9), priority=-1) for n in range(5)
    ]
    while not all(one.begun for one in high):
        engine.advance()
        begun = {one for one in low + high if one.begun} | seated(engine)
        assert begun.isdisjoint(low[2:]) or begun.issuperset(high)
    engines.finish(engine)
    assert all(map(engines.as_alone, low + high))


REFUSALS: tuple[tuple[list[int], dict[str, Any], str], ...] = (
    ([1] * 30, {"max_tokens": 11}, "prompt: 30 tokens and 11 to come pass the context of 40"),
    ([], {}, "prompt: it has no tokens"),
    ([3, 61], {}, "prompt: token 61 is not in the vocabulary of 61"),
    ([3, -1], {}, "prompt: token -1 is not in the vocabulary of 61"),
    ([1], {"n": 4}, "n: expected at most 3 sequences, got 4: there are 6 rows"),
    ([1, 2], {"n": 3, "max_tokens": 16}, "3 x 16 output tokens may need 25 blocks .* has 20"),
    ([1], {"stop_token_ids": tuple(range(9))}, "stop_token_ids: at most 8 .* got 9"),
)


def test_a_refused_request_harms_no_other() -> None:
    engine = engines.create()
    load = engines.random_requests(13, len(REFUSALS), prompt=6, output=11)
    requests = []
    for (prompt, params, message), one in zip(REFUSALS, load, strict=True):
        busy = engine.busy
        with pytest.raises(ValueError, match=message):
            engine.add(prompt, SamplingParams(**params))
        assert engine.busy == busy
        requests.append(engine.add(*one))
        engine.advance()
        with pytest.raises(ValueError, match="being served"):
            engine.warm()
    engines.finish(engine)
    assert all(map(engines.as_alone, requests))


def test_what_no_step_could_take_whole_is_refused() -> None:
    engine = engines.create(chunked_prefill=False)
    with pytest.raises(ValueError, match=r"step_tokens: .* 5 prompt and 5 output .* 9; it takes 8"):
        engine.add([1] * 5, SamplingParams(max_tokens=5))
    request = engine.add([1] * 5, dataclasses.replace(DRAWN, max_tokens=4))
    engines.finish(engine)
    assert engines.as_alone(request)


def test_a_repetition_penalty_sees_prompt_and_output() -> None:
    """Greedy with a penalty, against logits by the definition; resumed after preemptions."""
    penalty = dataclasses.replace(engines.KINDS[0], repetition_penalty=1.4, max_tokens=12)
    engine = engines.create()
    requests = [engine.add([number, 14, 15], penalty) for number in range(9)]
    engines.finish(engine)
    assert engine.preemptions
    weights = definition.weights_of(engines.MODEL.decoder)
    for request in requests:
        ids = list(request.prompt_ids)
        for _ in range(12):
            logit_V = np.array(definition.logits(models.TINY, weights, ids)[-1])
            seen = [*{*ids}]
            logit_V[seen] = np.where(logit_V[seen] > 0, logit_V[seen] / 1.4, logit_V[seen] * 1.4)
            ids.append(int(logit_V.argmax()))
        assert engines.tokens_of(request) == [ids[3:]]


class Letters:
    """A tokenizer of one sign a token."""

    def encode(self, text: str) -> list[int]:
        return [ord(sign) - 48 for sign in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(chr(48 + token) for token in ids)


def test_a_stop_string_ends_a_row_at_the_next_boundary(monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[tuple[int, int]] = []

    def stop(engine: Engine, request: Request, sequence: Sequence, tokens: int) -> None:
        stops.append((tokens, len(sequence.token_ids)))
        stop_as_ever(engine, request, sequence, tokens)

    stop_as_ever = Engine.stop
    monkeypatch.setattr(Engine, "stop", stop)
    engines.create()
    llm = LLM(engines.MODEL)
    llm.config, llm.tokenizer = engines.CONFIG, Letters()
    params = dataclasses.replace(engines.KINDS[2], top_p=0.9, n=3, max_tokens=12)
    free = llm.generate(["5", "8ab"], params)
    texts = [one.text or "" for output in free for one in output.outputs]
    stopping = texts[1][3:5]
    assert not stops
    found = llm.generate(["5", "8ab"], dataclasses.replace(params, stop=(stopping,)))
    for one, text in zip([one for output in found for one in output.outputs], texts, strict=True):
        assert one.text == text.partition(stopping)[0]
        assert one.finish_reason == ("stop" if stopping in text else "length")
    assert found[0].outputs[1].token_ids == tuple(Letters().encode(texts[1][:5]))
    assert stops[0][0] == 5
    assert all(0 <= drawn - tokens < engines.CONFIG.dispatch_steps for tokens, drawn in stops)
    assert any(drawn > tokens for tokens, drawn in stops)


@pytest.mark.slow
def test_ten_thousand_wait() -> None:
    engine = engines.create()
    random = np.random.default_rng(0)
    greedy = dataclasses.replace(engines.KINDS[0], max_tokens=1)
    requests = [
        engine.add(ids.tolist(), greedy, priority=int(ids.sum()) % 3)
        for ids in random.integers(0, 61, (10_000, 2))
    ]
    engines.finish(engine)
    assert all(one.finished for one in requests)
    assert all(map(engines.as_alone, requests[::500]))


@pytest.mark.slow
def test_a_pool_of_one_block() -> None:
    """One request at a time, whatever it is, and those that need two are refused."""
    config = EngineConfig(block_size=8, pool_slots=8, max_length=32, rows=4, step_tokens=8)
    engine = Engine(engines.MODEL, config, samples=2)
    with pytest.raises(ValueError, match="1 x 8 output tokens may need 2 blocks of 8 slots"):
        engine.add([1, 2], dataclasses.replace(DRAWN, max_tokens=8))
    with pytest.raises(ValueError, match="2 x 2 output tokens may need 2 blocks"):
        engine.add([1, 2], dataclasses.replace(DRAWN, n=2, max_tokens=2))
    load = [([1] * length, 9 - length) for length in range(1, 9)]
    requests = [engine.add(ids, dataclasses.replace(DRAWN, max_tokens=most)) for ids, most in load]
    engines.finish(engine)
    assert all(map(engines.as_alone, requests))
    assert engine.memory.settle().running == 1


@pytest.mark.slow
def test_kinds_of_sampling_that_come_late() -> None:
    """Programs are made anew while others run, whose tokens stay what they are."""
    engine = Engine(engines.MODEL, engines.CONFIG, samples=engines.SAMPLES)
    requests = []
    for kind in engines.KINDS:
        requests.append(engine.add([5, 6], dataclasses.replace(kind, max_tokens=20)))
        engine.advance()
        engine.advance()
    engines.finish(engine)
    assert all(map(engines.as_alone, requests))
