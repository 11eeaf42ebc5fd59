"""Rewarm makes few objects before the first event of a request: every request pays for them."""

from __future__ import annotations

import asyncio
import dis
import json
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import rewarm
from rewarm.options import ServerOptions
from rewarm.server.app import create_app
from tests.engines import started_engine

HOME = str(Path(rewarm.__file__).parent)
BEFORE = 106
"""The number of objects that were made before the rooms were rebuilt."""
PATH = "/v1/chat/completions"


class Made:
    """A trace function that counts the objects that Rewarm's own frames make.

    - instances and named tuples: calls of an `__init__`, or of a named tuple's `__new__`, that is
      written in Python, by a frame of Rewarm;
    - dicts: `BUILD_MAP` instructions (`{...}`, dict comprehensions and `**` in a call);
    - closures: `MAKE_FUNCTION` instructions for a `def` or a `lambda`, comprehensions left aside.

    Frames of the engine's thread do not count.
    """

    def __init__(self) -> None:
        self.found: Counter[tuple[str, str, str]] = Counter()
        self.on = False
        self._kinds: dict[CodeType, dict[int, str]] = {}

    @contextmanager
    def installed(self) -> Iterator[None]:
        before = sys.gettrace()
        threading.settrace(self)
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)
            threading.settrace(before)  # type: ignore[arg-type]

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        if not self.on or threading.current_thread().name == "rewarm-engine":
            return None
        maker = frame.f_back
        if maker is not None and maker.f_code.co_filename.startswith(HOME):
            self._note_instance(frame, maker)
        if not frame.f_code.co_filename.startswith(HOME):
            return None
        frame.f_trace_lines, frame.f_trace_opcodes = False, True
        return self._instruction

    def _note_instance(self, frame: FrameType, maker: FrameType) -> None:
        code = frame.f_code
        first = frame.f_locals.get(code.co_varnames[0]) if code.co_argcount else None
        if code.co_name == "__init__" and not _is_super_call(first, maker):
            self._note("instance", type(first).__name__, maker)
        elif isinstance(first, type) and code.co_varnames[0] == "_cls":
            self._note("instance", first.__name__, maker)

    def _instruction(self, frame: FrameType, event: str, arg: Any) -> Any:
        if event == "opcode" and self.on:
            code = frame.f_code
            if code not in self._kinds:
                self._kinds[code] = dict(_makers(code))
            kind = self._kinds[code].get(frame.f_lasti)
            if kind is not None:
                self._note(kind, code.co_name, frame)
        return self._instruction

    def _note(self, kind: str, name: str, frame: FrameType) -> None:
        self.found[kind, name, str(Path(frame.f_code.co_filename).relative_to(HOME))] += 1


def _is_super_call(instance: Any, maker: FrameType) -> bool:
    code = maker.f_code
    return code.co_name == "__init__" and maker.f_locals.get(code.co_varnames[0]) is instance


def _makers(code: CodeType) -> Iterator[tuple[int, str]]:
    """Find the instructions of a function that make an object."""
    function = ""
    for instruction in dis.get_instructions(code):
        if isinstance(instruction.argval, CodeType):
            function = instruction.argval.co_name
        if instruction.opname in ("BUILD_MAP", "BUILD_CONST_KEY_MAP"):
            yield instruction.offset, "dict"
        elif instruction.opname == "MAKE_FUNCTION" and (
            function == "<lambda>" or not function.startswith("<")
        ):
            yield instruction.offset, "closure"


async def post(app: Any, made: Made, question: str) -> str:
    """Post a chat and read the stream. Objects that are made before its first event count."""
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hi."},
        {"role": "user", "content": question},
    ]
    body = json.dumps({"model": "m", "messages": chat, "max_tokens": 4, "stream": True}).encode()
    headers = {b"host": b"localhost", b"content-type": b"application/json"}
    sent = ""
    over = asyncio.Event()
    messages = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> dict[str, Any]:
        if not messages:
            await over.wait()
            return {"type": "http.disconnect"}
        return messages.pop()

    async def send(message: dict[str, Any]) -> None:
        nonlocal sent
        if message["type"] == "http.response.body":
            made.on = False
            sent += message["body"].decode()
            if not message["more_body"]:
                over.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": PATH,
        "raw_path": PATH.encode(),
        "root_path": "",
        "scheme": "http",
        "query_string": b"",
        "headers": list(headers.items()),
    }
    made.on = True
    await app(scope, receive, send)
    return sent


def test_a_request_makes_half_of_what_it_made() -> None:
    """N was 106 before the rooms were rebuilt, counted by this code on the tree of that time: 45
    instances and named tuples, 52 dicts and 9 closures for an OpenAI chat of four messages,
    streamed, on a server that has seen others like it. At most N/2 are made now."""
    made, counts = Made(), []
    with made.installed():
        engine, _ = started_engine()
        try:
            assert engine.wait(60) == "ready", engine.detail
            app = create_app(engine, ServerOptions(warm_ahead=False))

            async def several() -> None:
                for i in range(4):
                    made.found.clear()
                    assert "[DONE]" in await post(app, made, f"How are you, {i}?")
                    counts.append(made.found.copy())

            asyncio.run(several())
        finally:
            made.on = False
            engine.stop()
    least = min(counts[1:], key=Counter.total)
    assert {kind for kind, _, _ in least} >= {"instance", "dict"}
    assert least.total() <= BEFORE // 2, "\n".join(f"{n} {w}" for w, n in sorted(least.items()))
