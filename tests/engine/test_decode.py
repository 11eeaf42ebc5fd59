"""A decoder may append more than it gives, and take it back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import mlx.core as mx
import numpy as np
import pytest

from rewarm.cache import PrefixCache
from rewarm.cache.layer_kinds import leaves
from rewarm.engine import Core, EngineParts, Request
from rewarm.engine.decode.batch import Batch, Step, merged
from rewarm.engine.decode.undo import Before
from rewarm.engine.trial import decodes_in_batches
from rewarm.options import EngineOptions
from rewarm.values import Sampling
from tests import zoo
from tests.engines import Collected
from tests.runs import Prompt, joined, prompt, run
from tests.sets import SOAK

ALONE = ["afm7", "deepseek_v41", "gemma2", "llama4", "minimax_m3_vl"]
"""Models that never decode in a batch, so their caches are never merged."""
LENGTHS = (5, 28, 31, 70)
"""Prompts that leave a window of 32 rows nearly empty, about to wrap, and wrapped."""
WITHOUT_WINDOW = (31,)
APPENDED = 6
AFTER = 40 if SOAK else 4
"""The number of steps after tokens are taken back. Before these, the whole caches are compared."""
ANSWER = 40 if SOAK else 12
"""The length of an answer in tokens. With a prompt of 25 it is longer than the window."""


def steps(model: Any, caches: list[Any], tokens: Sequence[Sequence[int]]) -> list[bytes]:
    """Make one pass for each entry, with a token of every sequence. Return the logits' bits."""
    bits = []
    for each in tokens:
        logits = model(mx.array(each)[:, None], cache=caches)
        mx.eval(logits, [c.state for c in caches])
        bits.append(np.array(logits.view(mx.uint8)).tobytes())
    return bits


def junk(width: int, count: int) -> list[list[int]]:
    return [[(7 * i + 3 * j) % 512 for j in range(width)] for i in range(count)]


def prefilled(model: Any, blank: Any, tokens: Prompt) -> list[Any]:
    caches: list[Any] = blank()
    model(mx.array(tokens)[None], cache=caches)
    mx.eval([c.state for c in caches])
    return caches


def bits(caches: list[Any]) -> list[Any]:
    """Read all that a prompt cache holds below its length, and its position."""
    found = []
    for leaf in leaves(caches):
        for name, value in sorted(vars(leaf).items()):
            if name in ("keys", "values") and value is not None:
                arrays = value if isinstance(value, (list, tuple)) else [value]
                end = getattr(leaf, "_idx", leaf.offset)
                if hasattr(leaf, "max_size"):
                    end = arrays[0].shape[2]
                elif hasattr(leaf, "start_position"):
                    end = leaf.offset - leaf.start_position
                found.append([raw(a[:, :, :end]) for a in arrays])
            else:
                found.append((name, plain(value)))
    return found


def plain(value: Any) -> Any:
    if isinstance(value, mx.array):
        return raw(value)
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    return value


def raw(array: mx.array) -> bytes:
    return np.array(mx.contiguous(array).view(mx.uint8)).tobytes() if array.size else b""


def assert_takes_back(model: Any, make: Any, width: int, at_once: bool) -> None:
    """Compare caches that took tokens back with others that never had them."""
    expected, caches = make(), make()
    own = junk(width, 3)
    assert steps(model, expected, own) == steps(model, caches, own)
    before = Before(caches, APPENDED)
    wrong = junk(width, APPENDED)[::-1]
    if at_once:
        tokens = mx.array(np.array(wrong).T)
        mx.eval(model(tokens, cache=caches), [c.state for c in caches])
    else:
        steps(model, caches, wrong)
    restored = before.restored()
    assert bits(restored) == bits(expected)
    after = junk(width, AFTER)
    assert steps(model, restored, after) == steps(model, expected, after)


@pytest.mark.parametrize(
    ("name", "at_once"),
    [
        (name, at_once)
        for i, name in enumerate(zoo.SAMPLE)
        for at_once in (False, True)
        if SOAK or i % 2 == at_once
    ],
)
def test_what_is_taken_back_leaves_no_bit_alone(name: str, at_once: bool) -> None:
    model = zoo.tiny(name)
    cache = PrefixCache(model, memory="64MB")
    blank = cache.blank
    for length in LENGTHS if SOAK else LENGTHS[1:] if cache.layout.has_window else WITHOUT_WINDOW:
        tokens = prompt(length, vocabulary=zoo.vocabulary(name))
        assert_takes_back(model, lambda t=tokens: prefilled(model, blank, t), 1, at_once)


@pytest.mark.parametrize("at_once", [False, True], ids=["steps", "at once"])
def test_what_is_taken_back_leaves_no_bit_of_quantised_rows(at_once: bool) -> None:
    model = zoo.tiny("llama")
    blank = PrefixCache(model, memory="64MB", kv_bits=8, kv_group_size=32).blank
    assert_takes_back(model, lambda: prefilled(model, blank, prompt(70)), 1, at_once)


@pytest.mark.parametrize("name", ALONE)
def test_some_architectures_decode_one_sequence_at_a_time(name: str) -> None:
    model = zoo.tiny(name)
    blank = PrefixCache(model, memory="64MB").blank
    assert not decodes_in_batches(model, blank, zoo.vocabulary(name))


@pytest.mark.parametrize("name", [name for name in zoo.SAMPLE if name not in ALONE])
def test_what_is_taken_back_leaves_no_bit_in_a_merged_batch(name: str) -> None:
    model = zoo.tiny(name)
    blank = PrefixCache(model, memory="64MB").blank

    def make() -> list[Any]:
        lengths = (9, 29, 70)
        prompts = [prompt(n, n, vocabulary=zoo.vocabulary(name)) for n in lengths]
        return merged([prefilled(model, blank, p) for p in prompts])

    assert_takes_back(model, make, 3, at_once=False)


class Guesses(Batch):
    """A decoder that gives three tokens in a step, and takes back junk that it appends to each."""

    most: ClassVar[int] = 3

    def __init__(self, *start: Any) -> None:
        super().__init__(*start)
        self._marks: list[Before] = []

    def step(self) -> list[Step]:
        generation = self._generation
        self._marks = []
        steps: list[Step] = []
        for _ in range(self.most):
            before = Before(generation.prompt_cache, 3)
            wrong = mx.array([[5 + i] for i in range(len(self.ids))])
            for _ in range(3):
                mx.eval(generation.model(wrong, cache=generation.prompt_cache))
            generation.prompt_cache = before.restored()
            self._marks.append(Before(generation.prompt_cache, 3))
            steps += super().step()
        return steps

    def caches(self, sequence: int, unused: int = 0) -> list[Any]:
        live = self._generation.prompt_cache
        if unused:
            self._generation.prompt_cache = self._marks[-unused].restored()
        try:
            return super().caches(sequence)
        finally:
            self._generation.prompt_cache = live


def answers(model: Any, decoder: type[Batch], together: bool) -> tuple[list[Any], list[Any]]:
    """Return the answers to requests, and the answers to prompts that extend them."""
    cache = PrefixCache(model, memory="64MB", chunk=32)
    core = Core(EngineParts(model, None, cache), EngineOptions(max_batch=4), decoder=decoder)
    sinks = []
    for i in range(3):
        sinks.append(Collected())
        sampling = Sampling(temperature=1.0, seed=i) if i else Sampling()
        core.submit(Request(prompt(25 + i, seed=i), sinks[-1], ANSWER + i, sampling))
        while not together and core.wait(0):
            core.turn()
    while core.wait(0):
        core.turn()
    core.close()
    cache.verify()
    said = [(s.tokens, s.reasons, s.calls_after_end) for s in sinks]
    later = []
    for i, sink in enumerate(sinks):
        answer = np.array(sink.tokens, np.int32)
        ran = run(model, cache, joined(prompt(25 + i, seed=i), answer, prompt(9, seed=9)))
        later.append((ran.match.resume, ran.logits.tobytes()))
    assert all(resume == 25 + i + ANSWER + i for i, (resume, _) in enumerate(later))
    return said, later


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss", "llama4", "nemotron_h", "rwkv7"])
def test_a_decoder_that_gives_several_tokens_a_step_changes_no_answer_and_no_tree(
    name: str,
) -> None:
    model = zoo.tiny(name)
    assert answers(model, Guesses, together=False) == answers(model, Batch, together=False)


@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gpt_oss"])
def test_several_sequences_that_guess_together_get_the_answers_of_plain_decoding(name: str) -> None:
    model = zoo.tiny(name)
    guessed, _ = answers(model, Guesses, together=True)
    assert guessed == answers(model, Batch, together=True)[0]
