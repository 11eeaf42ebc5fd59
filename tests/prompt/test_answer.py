"""Generated tokens become messages: nothing is lost, nothing leaks, no character is cut."""

from __future__ import annotations

import json
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mlx_lm.tokenizer_utils import SPMStreamingDetokenizer, TokenizerWrapper

from rewarm.prompt.parse.answer import Answer, Increment, Stops
from tests.chats import TOKENIZERS, TOOLS, answering
from tests.tiny import tiny_tokenizer

pytestmark = pytest.mark.corpus

# Without the null byte, which mlx-lm's detokenizer takes for another character.
texts = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=60)


def said(answer: Answer, tokens: Iterable[int]) -> list[Increment]:
    """Read all pieces of an answer, and check that they add up to what it holds."""
    pieces = [answer.add(token) for token in tokens]
    pieces.append(answer.finish())
    assert "".join(p.text for p in pieces) == answer.text
    assert "".join(p.reasoning for p in pieces) == answer.reasoning
    assert [c for p in pieces for c in p.calls] == answer.calls
    return pieces


def encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False))


def answer_to(name: str, prompt: str, text: str, **options: Any) -> Answer:
    tokenizer = answering(name)
    answer = Answer(tokenizer, encoded(tokenizer, prompt), **options)
    said(answer, encoded(tokenizer, text))
    return answer


def functions(answer: Answer) -> list[tuple[str, Any]]:
    called = [c["function"] for c in answer.calls]
    return [(f["name"], json.loads(f["arguments"])) for f in called]


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts)
def test_pieces_add_up_to_the_text_and_no_character_is_cut(name: str, text: str) -> None:
    tokenizer = answering(name)
    tokens = [t for t in encoded(tokenizer, text) if t not in tokenizer.eos_token_ids]
    answer = Answer(tokenizer, encoded(tokenizer, "a"), raw=True)
    pieces = said(answer, tokens)
    assert answer.text == tokenizer.decode(tokens)
    assert ("\ufffd" in "".join(p.text for p in pieces)) == ("\ufffd" in text)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(tokens=st.lists(st.integers(0, 300_000), max_size=30), raw=st.booleans())
def test_any_tokens_make_some_answer(name: str, tokens: list[int], raw: bool) -> None:
    answer = Answer(answering(name), [1, 2], raw=raw, stop=["a", "</"], tools=TOOLS)
    pieces = said(answer, tokens)
    assert answer.text == "".join(p.text for p in pieces)
    assert answer.reasoning == "".join(p.reasoning for p in pieces)
    (answer.text + answer.reasoning).encode()  # no lone surrogates
    assert json.loads(json.dumps(answer.message()))["content"] == answer.text


@pytest.mark.parametrize("name", TOKENIZERS)
@given(text=texts, cut=st.integers(0, 200))
def test_half_a_character_at_the_end_is_left_out(name: str, text: str, cut: int) -> None:
    tokenizer = answering(name)
    text = text.replace("\ufffd", "") + "日本語🦩"
    answer = Answer(tokenizer, encoded(tokenizer, "a"), raw=True)
    said(answer, encoded(tokenizer, text)[:cut])
    assert text.startswith(answer.text)


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize("text", ["\ufffd", "ab\ufffd", "日 \ufffd\ufffd", "!\ufffd"])
def test_a_replacement_character_that_was_written_stays(name: str, text: str) -> None:
    assert answer_to(name, "a", text, raw=True).text == text


@pytest.mark.parametrize("name", TOKENIZERS)
@pytest.mark.parametrize(
    "end", [*"é中日😀🫠𓀀ꙮ", "👩\u200d🚀", "x ", "x  ", "\n", "\ufffd", "日\ufffd", ""]
)
@pytest.mark.parametrize("text", [" ok", "ok", "😀 ok"])
def test_nothing_of_the_prompt_is_left_in_the_answer(name: str, end: str, text: str) -> None:
    for prompt in (f"abc {end}", end):
        for options in ({"raw": True}, {"continued": True}):
            if prompt.strip(" \n\ufffd") or not text.startswith(" "):
                assert answer_to(name, prompt, text, **options).text == text


def test_a_prompt_that_ends_in_half_a_character_costs_no_space() -> None:
    for name in TOKENIZERS:
        tokenizer = answering(name)
        for prompt in ([*encoded(tokenizer, "abc𓀀")[:-1]], [300_000] * 12, []):
            answer = Answer(tokenizer, prompt, raw=True)
            said(answer, encoded(tokenizer, "ok"))
            assert answer.text.lstrip("\ufffd!") == "ok"


@given(
    text=st.text("ab ", max_size=30),
    stops=st.lists(st.text("ab ", min_size=1, max_size=4), max_size=3),
    cuts=st.lists(st.integers(0, 30), max_size=6),
)
def test_the_first_complete_stop_sequence_ends_the_text_however_it_is_cut(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    ends = [(text.index(s) + len(s), -len(s)) for s in stops if s in text]
    expected = text[: min(ends)[0] + min(ends)[1]] if ends else text
    finder = Stops(stops)
    places = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    given_out = ""
    for begin, end in pairwise(places):
        given_out += finder.feed(text[begin:end])
        if finder.found is not None:
            break
    else:
        given_out += finder.flush()
    assert given_out == expected
    assert (finder.found is not None) == bool(ends)
    assert all(s not in given_out for s in stops)


@pytest.mark.parametrize("name", TOKENIZERS)
@given(before=texts, after=texts)
def test_a_stop_sequence_never_leaks(name: str, before: str, after: str) -> None:
    stop = "##END"
    answer = answer_to(name, "a", before + stop + after, stop=[stop, "never"], raw=True)
    assert answer.stopped_by == stop
    assert answer.text == (before + stop + after).split(stop)[0]


def test_a_stop_sequence_is_looked_for_in_the_content_only() -> None:
    text = "I stop to think.</think>\n\nGo on, then stop here."
    answer = answer_to("chatml", "<|im_start|>assistant\n<think>\n", text, stop=["stop"])
    assert answer.reasoning == "I stop to think."
    assert answer.text == "Go on, then "
    assert answer.stopped_by == "stop"
    assert answer.add(3) == answer.finish() == Increment()


def test_a_stop_sequence_spans_no_call_and_no_thinking() -> None:
    calls = f"Look:\n{qwen_call('Ayr')}\n{qwen_call('Oban')}"
    answer = answer_to("chatml", "", calls, tools=TOOLS, stop=["\n\n"])
    assert [a["port"] for _, a in functions(answer)] == ["Ayr", "Oban"]
    assert (answer.text, answer.stopped_by) == ("Look:\n\n", None)
    answer = answer_to("chatml", "", "A ST<think>Hm.</think>OP", stop=["STOP"])
    assert (answer.text, answer.reasoning, answer.stopped_by) == ("A STOP", "Hm.", None)


def test_text_held_back_before_a_call_comes_with_it() -> None:
    tokenizer = answering("chatml")
    answer = Answer(tokenizer, [], tools=TOOLS, stop=["\n\n"])
    pieces = said(answer, encoded(tokenizer, f"Look:\n{qwen_call('Ayr')} Done."))
    at = next(i for i, p in enumerate(pieces) if p.calls)
    assert "".join(p.text for p in pieces[: at + 1]) == "Look:\n"
    assert "".join(p.text for p in pieces[at + 1 :]) == " Done."


def test_what_was_held_back_comes_at_the_end() -> None:
    answer = answer_to("chatml", "", "Ends with STO", stop=["STOP"])
    assert answer.text == "Ends with STO"
    assert answer.stopped_by is None
    answer = answer_to("chatml", "", "Half a <tool_c")
    assert answer.text == "Half a <tool_c"
    assert answer.finish() == Increment()


def test_a_token_that_ends_the_text_adds_none() -> None:
    tokenizer = answering("chatml")
    answer = Answer(tokenizer, [])
    said(answer, [*encoded(tokenizer, "Yes."), tokenizer.eos_token_id])
    assert answer.message() == {"role": "assistant", "content": "Yes."}


def test_raw_text_keeps_its_first_space_and_all_markers() -> None:
    text = " time <think>hm</think><tool_call>x</tool_call>"
    answer = answer_to("chatml", "Once upon a", text, raw=True)
    assert (answer.text, answer.reasoning, answer.calls) == (text, "", [])
    assert answer_to("chatml", "Once upon a", " time", continued=True).text == " time"


def test_thinking_that_the_template_opened_is_told_apart() -> None:
    opened = "<|im_start|>assistant\n<think>\n"
    answer = answer_to("chatml", opened, "Hm, hm.\n</think>\n\nYes.")
    assert (answer.reasoning, answer.text) == ("Hm, hm.", "Yes.")
    assert answer.message()["reasoning_content"] == "Hm, hm."
    closed = opened + "\n</think>\n\n"
    assert answer_to("chatml", closed, "Yes.").text == "Yes."
    itself = answer_to("chatml", "<|im_start|>assistant\n", "<think>Hm.</think>Yes.")
    assert (itself.reasoning, itself.text) == ("Hm.", "Yes.")


def qwen_call(port: str) -> str:
    return (
        "<tool_call>\n<function=tide>\n<parameter=port>\n"
        f"{port}\n</parameter>\n</function>\n</tool_call>"
    )


def test_parallel_tool_calls_are_told_apart() -> None:
    text = f"Let me see.\n\n{qwen_call('Ayr')}\n{qwen_call('Öban')}"
    answer = answer_to("chatml", "", text, tools=TOOLS)
    assert functions(answer) == [("tide", {"port": "Ayr"}), ("tide", {"port": "Öban"})]
    assert answer.text.strip() == "Let me see."
    assert len({c["id"] for c in answer.message()["tool_calls"]}) == 2
    # The last call may lack its end marker, which ends some models' answers.
    answer = answer_to("chatml", "", qwen_call("Ayr").removesuffix("</tool_call>"), tools=TOOLS)
    assert functions(answer) == [("tide", {"port": "Ayr"})]


@pytest.mark.parametrize("call", ["{", "no call at all", '{"name": 3}', "[1, 2]", '"x"', "null"])
def test_what_is_no_tool_call_comes_out_as_text(call: str) -> None:
    text = f"a<tool_call>{call}</tool_call>b"
    assert answer_to("chatml", "", text, tools=TOOLS).text == text


def test_a_stumbling_tool_parser_loses_no_text() -> None:
    def stumbles(text: str, tools: Any) -> Any:
        raise AttributeError("'NoneType' object has no attribute 'group'")

    for parse in (stumbles, lambda text, tools: None, lambda text, tools: [1, 2]):
        tokenizer = TokenizerWrapper(
            tiny_tokenizer()._tokenizer,
            tool_parser=parse,
            tool_call_start="<call>",
            tool_call_end="</call>",
        )
        answer = Answer(tokenizer, [])
        said(answer, encoded(tokenizer, "a<call>b c</call>d"))
        assert answer.text == "a<call>b c</call>d"
        assert answer.calls == []


def test_tool_calls_keep_their_unicode() -> None:
    tokenizer = TokenizerWrapper(
        tiny_tokenizer()._tokenizer,
        tool_parser=lambda text, tools: json.loads(text),
        tool_call_start="<call>",
        tool_call_end="</call>",
    )
    answer = Answer(tokenizer, [])
    call = '{"name": "tide", "arguments": {"port": "Ö"}}'
    said(answer, encoded(tokenizer, f"Let me see.<call>{call}</call>"))
    assert answer.text == "Let me see."
    assert [c["function"] for c in answer.calls] == [{"name": "tide", "arguments": '{"port": "Ö"}'}]


GPT_OSS = "<|start|>assistant"


def test_channels_of_gpt_oss_are_told_apart() -> None:
    text = (
        "<|channel|>analysis<|message|>We need to think.<|end|>"
        "<|start|>assistant<|channel|>commentary<|message|>I will look.<|end|>"
        "<|start|>assistant<|channel|>final<|message|>At noon, a stop.<|return|>"
    )
    answer = answer_to("harmony", GPT_OSS, text, stop=["stop", "think"])
    assert answer.reasoning == "We need to think."
    assert answer.text == "I will look.At noon, a "
    assert answer.stopped_by == "stop"


@pytest.mark.parametrize(
    "header",
    [
        "<|channel|>commentary to=functions.tide <|constrain|>json<|message|>",
        " to=functions.tide<|channel|>commentary json<|message|>",
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant to=functions.tide"
        "<|channel|>commentary json<|message|>",
    ],
)
def test_tool_calls_of_gpt_oss(header: str) -> None:
    answer = answer_to("harmony", GPT_OSS, header + '{"port": "Ayr"}<|call|>')
    assert functions(answer) == [("tide", {"port": "Ayr"})]
    assert answer.text == ""
    assert answer_to("harmony", GPT_OSS, header + '{"port": "A').text == '{"port": "A'


def test_gpt_oss_without_its_format_is_text() -> None:
    assert answer_to("harmony", GPT_OSS, "Just <b>words</b>.").text == "Just <b>words</b>."
    assert answer_to("harmony", GPT_OSS, "<|channel|>").text == "<|channel|>"
    begun = GPT_OSS + "<|channel|>final<|message|>The tide"
    answer = answer_to("harmony", begun, " is high.<|return|>", continued=True)
    assert answer.text == " is high."
    thinking = GPT_OSS + "<|channel|>analysis<|message|>Hm"
    assert answer_to("harmony", thinking, ", so.<|end|>").reasoning == ", so."


def test_sentencepiece_tokens_that_spell_bytes_come_whole() -> None:
    class Pieces:
        def __init__(self) -> None:
            self.pieces = ["\u2581a", "<0xF0>", "<0x9F>", "<0xA6>", "<0xA9>", "\u2581b", "<e>"]
            self.eos_token_id, self.unk_token_id, self.chat_template = 6, None, None

        def __len__(self) -> int:
            return len(self.pieces)

        def convert_ids_to_tokens(self, ids: list[int]) -> list[str]:
            return [self.pieces[i] for i in ids]

        def apply_chat_template(self) -> None: ...

        def convert_tokens_to_ids(self, token: str) -> None: ...

        def get_vocab(self) -> dict[str, int]:
            return {p: i for i, p in enumerate(self.pieces)}

    tokenizer = TokenizerWrapper(Pieces(), SPMStreamingDetokenizer)
    answer = Answer(tokenizer, [])
    pieces = said(answer, [0, 1, 2, 3, 4, 5, 6])
    assert [p.text for p in pieces] == ["a", "", "", "", "🦩", " b", "", ""]
