"""A Session answers on a tiny hybrid model with a template that strips thinking."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.generate import generate_step

from rewarm import PrefixCache, Session
from rewarm.cache.tiers.fetch import Fetch
from rewarm.engine import runner
from rewarm.prompt.render.renderer import ChatRenderer
from tests import zoo
from tests.leaks import COMPILED
from tests.runs import Counted
from tests.tiny import tiny_model, tiny_tokenizer

SYSTEM = {"role": "system", "content": "You keep the harbour. " * 6}


def session_of(**options: Any) -> Session:
    model = Counted(tiny_model())
    cache = PrefixCache(model, **{"memory": "64MB", "chunk": 64, **options})
    return Session(model, tiny_tokenizer(), cache)


def chat_of(*questions: str) -> list[dict[str, Any]]:
    messages = [SYSTEM]
    for question in questions:
        messages += [
            {"role": "user", "content": question},
            {"role": "assistant", "content": f"<think>Hm.</think>As to {question}: yes."},
        ]
    return messages[:-1]


def computed(session: Session) -> int:
    return int(session.model.computed)


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_usage_is_what_was_counted_at_the_model_call(reuse: str) -> None:
    session = session_of(reuse=reuse)
    asked: list[str] = []
    previous = 0
    for turn in range(5):
        asked.append(f"Question {turn}, and some more words?")
        before = computed(session)
        reply = session.chat(chat_of(*asked), max_tokens=7)
        used = reply.usage
        assert used.cached_tokens + used.prefilled_tokens == used.prompt_tokens
        # Every token of the answer was also fed to the model.
        assert computed(session) - before == used.prefilled_tokens + used.completion_tokens
        assert used.completion_tokens == len(reply.tokens) <= 7
        assert reply.finish_reason in ("length", "stop")
        session.cache.verify()
        if turn:
            # All but this turn's own text is cached. The last answer is new without its thinking.
            assert used.prefilled_tokens <= used.prompt_tokens - previous + 40
        previous = used.prompt_tokens


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_a_warm_chat_answers_as_a_cold_one(reuse: str) -> None:
    session = session_of(reuse=reuse)
    for questions in (["One?"], ["One?", "Two?"], ["One?", "Zwei?"], ["One?", "Two?", "Three?"]):
        warm = session.chat(chat_of(*questions), max_tokens=12, logprobs=True)
        fresh = session_of(reuse=reuse)
        cold = fresh.chat(chat_of(*questions), max_tokens=12, logprobs=True)
        assert warm.tokens == cold.tokens
        assert warm.logprobs is not None
        assert cold.logprobs is not None
        assert np.allclose(warm.logprobs, cold.logprobs, atol=0 if reuse == "exact" else 1e-4)
    assert session.cache.stats().hits == 3


def test_greedy_tokens_and_logprobs_are_mlx_lms() -> None:
    session = session_of()
    tokens = list(range(1, 150))
    reply = session.generate(tokens, max_tokens=8, logprobs=True)
    steps = generate_step(mx.array(tokens), tiny_model(), max_tokens=8)
    expected = [(int(token), float(logprobs[token])) for token, logprobs in steps]
    assert reply.tokens == [token for token, _ in expected][: len(reply.tokens)]
    assert reply.logprobs is not None
    assert np.allclose(reply.logprobs, [p for _, p in expected][: len(reply.tokens)], atol=1e-4)


def test_an_edited_question_resumes_before_it_and_a_repeat_at_its_end() -> None:
    session = session_of()
    session.chat(chat_of("One?", "Two?"), max_tokens=4)
    edited = session.chat(chat_of("One?", "Something else?"), max_tokens=4)
    text = session.tokenizer.apply_chat_template(
        chat_of("One?", "Two?")[:-1], tokenize=False, add_generation_prompt=False
    )
    assert edited.usage.cached_tokens >= len(session.tokenizer.encode(text))
    again = session.chat(chat_of("One?", "Something else?"), max_tokens=4)
    assert again.usage.cached_tokens == again.usage.prompt_tokens - 1
    assert again.miss is None
    assert again.tokens == edited.tokens


def test_the_decoded_answer_is_reused_where_the_next_prompt_repeats_it() -> None:
    session = session_of()
    first = session.generate(list(range(1, 60)), max_tokens=10)
    more = [*range(1, 60), *first.tokens, 5, 6, 7]
    assert session.generate(more, max_tokens=1).usage.cached_tokens == 59 + len(first.tokens)


def test_streamed_pieces_add_up_to_the_reply() -> None:
    session = session_of()
    events = list(session.stream(chat_of("One?"), max_tokens=20, temperature=1.0))
    reply = events[-1].reply
    assert reply is not None
    assert [e.token for e in events[:-1]] == reply.tokens
    assert "".join(e.text for e in events) == reply.text
    assert "".join(e.reasoning for e in events) == reply.reasoning
    assert reply.timings.ttft_ms >= reply.timings.prefill_ms > 0


def test_thinking_is_told_apart_from_the_answer() -> None:
    """The template opens the thinking, so the reply begins inside it."""
    session = session_of()
    reply = session.chat(chat_of("One?"), max_tokens=6)
    assert reply.text == ""
    assert reply.reasoning or reply.finish_reason == "stop"
    plain = session.generate("no template here", max_tokens=6)
    assert plain.reasoning == ""


def test_progress_is_told_after_every_chunk() -> None:
    session = session_of()
    seen: list[tuple[int, int]] = []
    reply = session.generate(
        list(range(1, 200)), max_tokens=1, on_prefill=lambda *p: seen.append(p)
    )
    assert [done for done, _ in seen] == [0, 64, 128, 192, 198]
    assert {total for _, total in seen} == {reply.usage.prompt_tokens}


def test_cancelling_a_prefill_keeps_its_chunks() -> None:
    session = session_of()
    cancel, before = threading.Event(), computed(session)
    tokens = list(range(1, 250))
    reply = session.generate(
        tokens, cancel=cancel, on_prefill=lambda done, _: cancel.set() if done >= 128 else None
    )
    assert reply.finish_reason == "cancelled"
    assert (reply.tokens, reply.usage.prefilled_tokens) == ([], 128)
    assert computed(session) - before == 128
    assert session.cache.match(tokens).resume == 128
    assert session.cache.stats().leases == 0


@pytest.mark.parametrize("how", ["event", "close"])
def test_cancelling_an_answer_stops_it_and_keeps_it(how: str) -> None:
    session = session_of()
    tokens = list(range(1, 100))
    cancel = threading.Event()
    # The answer does not end by itself: one that is over cannot be cancelled.
    unending = dict.fromkeys(session.tokenizer.eos_token_ids, -100.0)
    stream = session.stream(
        tokens, max_tokens=200, cancel=cancel, temperature=1.0, logit_bias=unending
    )
    given = [next(stream).token for _ in range(5)]
    if how == "event":
        cancel.set()
        rest = list(stream)
        assert rest[-1].reply is not None
        assert rest[-1].reply.finish_reason == "cancelled"
    else:
        stream.close()
    assert session.cache.stats().leases == 0
    assert session.cache.match([*tokens, *given, 1]).resume >= 99 + 5
    session.cache.verify()


def test_a_prompt_that_is_being_fetched_can_be_cancelled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokens = list(range(1, 200))
    before = session_of(disk=str(tmp_path))
    before.generate(tokens, max_tokens=1)
    before.cache.close()
    monkeypatch.setattr(runner, "PACE", 1e6)
    monkeypatch.setattr(Fetch, "on_done", lambda fetch, call: None)  # a tier that never answers
    session, cancel = session_of(disk=str(tmp_path)), threading.Event()
    timer = threading.Timer(0.1, cancel.set)
    timer.start()
    reply = session.generate(tokens, cancel=cancel)
    timer.join()
    assert (reply.finish_reason, reply.usage.prefilled_tokens) == ("cancelled", 0)
    assert session.cache.stats().leases == 0
    session.cache.close()


def test_an_exception_in_a_callback_leaves_nothing_pinned() -> None:
    session = session_of()

    def fails(done: int, total: int) -> None:
        if done:
            raise RuntimeError("the caller's own")

    with pytest.raises(RuntimeError, match="own"):
        session.generate(list(range(1, 200)), on_prefill=fails)
    assert session.cache.stats().leases == 0
    # One chunk was done. It is kept, although no checkpoint was due there.
    assert session.generate(list(range(1, 200)), max_tokens=1).usage.cached_tokens == 64
    assert session.generate(list(range(1, 200)), max_tokens=1).usage.cached_tokens == 198


def test_stop_sequences_end_the_answer_and_are_not_part_of_it() -> None:
    session = session_of()
    free = session.generate("abc", max_tokens=30, temperature=0.0)
    text = session.tokenizer.decode(free.tokens[2:3])
    reply = session.generate("abc", max_tokens=30, stop=[text])
    assert reply.finish_reason == "stop"
    assert text not in reply.text
    assert len(reply.tokens) <= 3


def test_a_penalty_sees_the_whole_prompt_however_much_was_cached() -> None:
    session = session_of()
    tokens = list(range(1, 120))
    options: dict[str, Any] = {"max_tokens": 6, "repetition_penalty": 3.0}
    cold = session.generate(tokens, **options)
    warm = session.generate(tokens, **options)
    assert warm.usage.cached_tokens == 118
    assert warm.tokens == cold.tokens
    assert cold.tokens != session.generate(tokens, max_tokens=6).tokens


def test_boundaries_are_stable_from_turn_to_turn() -> None:
    """Otherwise the grid of `exact` would move, and nothing could be reused."""
    session = session_of()
    render = ChatRenderer(session.tokenizer).render
    short = render(chat_of("One?", "Two?"), every_turn=True)
    long = render(chat_of("One?", "Two?", "Three?"), every_turn=True)
    assert len(short.boundaries) == 4
    kept = [b.position for b in short.boundaries]
    assert [b.position for b in long.boundaries][: len(kept)] == kept
    last = short.boundaries[-1].position
    assert np.array_equal(short.tokens[:last], long.tokens[:last])
    assert [b.kind for b in short.boundaries] == ["system", None, "turn", "user"]


def test_templates_that_refuse_a_probe_lose_only_that_boundary() -> None:
    session = session_of()
    session.tokenizer.chat_template = (
        "{%- for m in messages -%}{%- if m.role == 'assistant' -%}"
        "{{ raise_exception('no answers here') }}{%- endif -%}"
        "<|start|>{{ m.role }}\n{{ m.content }}<|end|>{%- endfor -%}<|start|>assistant\n"
    )
    rendered = ChatRenderer(session.tokenizer).render([SYSTEM, {"role": "user", "content": "Hm?"}])
    assert [b.kind for b in rendered.boundaries] == ["system"]
    assert session.chat([SYSTEM, {"role": "user", "content": "Hm?"}], max_tokens=2).tokens


def test_an_interrupted_step_stores_nothing_of_the_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its caches may have seen a token that is not in the answer."""
    session = session_of()
    tokens = list(range(1, 100))
    expected = session_of().generate(tokens, max_tokens=6).tokens
    stops_at = computed(session) + 99 + 3
    whole = Counted.__call__

    def interrupted(model: Counted, inputs: mx.array, **options: Any) -> mx.array:
        out = whole(model, inputs, **options)
        if model.computed == stops_at:
            raise KeyboardInterrupt
        return out

    with monkeypatch.context() as patched:
        patched.setattr(Counted, "__call__", interrupted)
        with pytest.raises(KeyboardInterrupt):
            session.generate(tokens, max_tokens=6)
    assert session.cache.stats().leases == 0
    session.cache.verify()
    assert session.cache.match([*tokens, *expected]).shared == 98
    assert session.generate(tokens, max_tokens=6).tokens == expected
    longer = [*tokens, *expected, 7]
    cold = session_of().generate(longer, max_tokens=4)
    assert session.generate(longer, max_tokens=4).tokens == cold.tokens


def test_an_interrupt_before_a_prompt_is_queued_ends_its_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = session_of()

    def interrupted(*asked: Any, **options: Any) -> Any:
        monkeypatch.undo()
        raise KeyboardInterrupt

    monkeypatch.setattr(session.cache, "match", interrupted)
    with pytest.raises(KeyboardInterrupt):
        session.generate(list(range(1, 50)), max_tokens=2)
    assert session.generate(list(range(1, 50)), max_tokens=2).usage.prefilled_tokens == 49


@pytest.mark.parametrize("failure", [KeyboardInterrupt, MemoryError])
def test_an_interrupted_chunk_leaves_only_what_was_whole(
    failure: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first layers have gone on already, so the state belongs to no position."""
    session = session_of()
    chat = chat_of("And all of this? " * 20)
    last = session.model._model.language_model.model.layers[-1]
    whole, calls = type(last).__call__, 0

    def interrupted(layer: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += layer is last
        if layer is last and calls == 6:
            raise failure
        return whole(layer, *args, **options)

    with monkeypatch.context() as patched:
        patched.setattr(type(last), "__call__", interrupted)
        with pytest.raises(failure):
            session.chat(chat, max_tokens=4)
    session.cache.verify()
    again = session.chat(chat, max_tokens=4, logprobs=True)
    cold = session_of().chat(chat, max_tokens=4, logprobs=True)
    assert again.usage.cached_tokens >= len(SYSTEM["content"])
    assert again.tokens == cold.tokens
    assert again.logprobs is not None
    assert cold.logprobs is not None
    assert np.allclose(again.logprobs, cold.logprobs, atol=1e-4)


def test_a_long_answer_on_a_sliding_window_can_be_resumed_anywhere() -> None:
    model = zoo.tiny("gpt_oss")
    session = Session(model, tiny_tokenizer(), PrefixCache(model, memory="64MB", chunk=32))
    reply = session.generate(list(range(1, 65)), max_tokens=120, temperature=0.0)
    assert len(reply.tokens) > 64
    whole = [*range(1, 65), *reply.tokens]
    for at in (70, 110, len(whole) - 3):
        other = (whole[at] + 1) % 512
        assert session.cache.match([*whole[:at], other, other]).resume == at


def test_a_session_has_no_thread_and_callbacks_run_on_the_callers() -> None:
    session = session_of()
    before, here = threading.active_count(), threading.get_ident()
    told: list[int] = []
    session.generate(
        list(range(1, 200)),
        max_tokens=3,
        on_prefill=lambda done, total: told.append(threading.get_ident()),
    )
    assert set(told) == {here}
    assert threading.active_count() == before


def test_two_streams_of_a_session_take_turns() -> None:
    session = session_of()
    asked = [list(range(1, 100)), list(range(150, 240))]
    alone = [session_of().generate(tokens, max_tokens=6).tokens for tokens in asked]
    streams = [session.stream(tokens, max_tokens=6) for tokens in asked]
    first = [next(streams[0]).token, next(streams[0]).token]
    rest = [list(stream)[-1].reply for stream in reversed(streams)]
    assert [reply.tokens for reply in rest if reply is not None] == alone[::-1]
    assert first == alone[0][:2]
    assert session.cache.stats().leases == 0


def ended(session: Session, question: str) -> Any:
    """Make an answer that ends by itself at once."""
    ends = dict.fromkeys(session.tokenizer.eos_token_ids, 100.0)
    reply = session.chat(chat_of(question), logit_bias=ends)
    assert reply.finish_reason == "stop"
    return reply


@pytest.mark.parametrize("reuse", ["fast", "exact"])
def test_what_is_prepared_is_not_computed_in_the_next_turn(reuse: str) -> None:
    def turn(prepared: bool) -> Any:
        session = session_of(reuse=reuse)
        first = ended(session, "One?")
        before = computed(session)
        if prepared:
            session.prepare()
            assert computed(session) > before
        asked = computed(session)
        answered = [*chat_of("One?"), {"role": "assistant", "content": first.text}]
        second = session.chat([*answered, {"role": "user", "content": "Two?"}], max_tokens=2)
        assert computed(session) - asked == second.usage.prefilled_tokens + len(second.tokens)
        return second

    cold, warm = turn(prepared=False), turn(prepared=True)
    assert warm.tokens == cold.tokens
    # In `exact` only whole chunks can be reused.
    assert warm.usage.cached_tokens >= cold.usage.cached_tokens + (reuse == "fast")


def test_nothing_is_prepared_before_anything_was_answered() -> None:
    session = session_of()
    before = computed(session)
    session.prepare()
    assert computed(session) == before


def test_an_interrupted_preparation_keeps_what_it_computed() -> None:
    session = session_of(chunk=32)
    ended(session, "One? " * 30)
    session.cache.clear()  # all of it has to be computed again
    whole, turns = session._core.turn, 0

    def interrupted() -> None:
        nonlocal turns
        turns += 1
        if turns == 3:
            raise KeyboardInterrupt
        whole()

    session._core.turn = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        session.prepare()
    session._core.turn = whole  # type: ignore[method-assign]
    assert session.cache.stats().leases == 0
    session.cache.verify()
    assert session.cache.stats().tokens >= 32
    session.prepare()
    again = session.chat(chat_of("One? " * 30), max_tokens=1)
    assert again.usage.cached_tokens >= len(SYSTEM["content"])


@pytest.mark.usefixtures("uncollected")
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_a_session_that_is_dropped_holds_nothing(name: str) -> None:
    model = zoo.tiny(name)
    tokens = list(range(50))
    Session(model, tiny_tokenizer(), PrefixCache(model, memory="64MB")).generate(tokens)
    before = mx.get_active_memory()
    session = Session(model, tiny_tokenizer(), PrefixCache(model, memory="64MB"))
    session.generate(tokens[::-1], max_tokens=4)
    assert mx.get_active_memory() > before
    del session
    assert mx.get_active_memory() - before <= COMPILED
