"""Ends of messages in a rendered chat, found by one more render with tags in the contents.

Where taking the tags out gives the text without them, the template has only copied the contents,
and the places of the tags are the messages' ends.
"""

from __future__ import annotations

import re
import secrets

from rewarm.values import Message


class Tags:
    """Tags that occur nowhere in a text."""

    def __init__(self, text: str) -> None:
        # Letters and digits only, which no template escapes, trims or splits; by chance, so that
        # nobody can write a text that holds them.
        self._mark = f"R{secrets.token_hex(8)}"
        while self._mark in text:
            self._mark = f"R{secrets.token_hex(8)}"
        self._pattern = re.compile(f"{self._mark}x([0-9]+)z")

    def tagged(self, chat: list[Message], *, continued: bool = False) -> list[Message]:
        """The chat with a tag at the end of each content, within the white space around it. Where
        the last one is to be continued, its tag is at the very end: so its white space is kept."""
        tagged = [self._tagged(i, message) for i, message in enumerate(chat)]
        if continued:
            last = chat[-1]
            tagged[-1] = {**last, "content": last["content"] + self._tag(len(chat) - 1)}
        return tagged

    def begun(self, chat: list[Message], *, continued: bool = False) -> list[Message]:
        """The same with the tags at the beginning of each content. One more tag keeps the white
        space at the end of the last one, where that is to be continued."""
        tagged = [self._begun(i, message) for i, message in enumerate(chat)]
        if continued:
            last = tagged[-1]
            tagged[-1] = {**last, "content": last["content"] + self._tag(len(chat))}
        return tagged

    def places(self, rendered: str, text: str, *, whole: bool = True) -> dict[int, int]:
        """The places of the tags in the text, in characters, by message. Not `whole`: the text is
        only the beginning of what was rendered."""
        found: dict[int, list[int]] = {}
        parts: list[str] = []
        begin = length = 0
        for match in self._pattern.finditer(rendered):
            parts.append(rendered[begin : match.start()])
            length += match.start() - begin
            begin = match.end()
            found.setdefault(int(match.group(1)), []).append(length)
        parts.append(rendered[begin:])
        untagged = "".join(parts)
        if not untagged.startswith(text) or (whole and untagged != text):
            return {}
        # One that is written twice has no place.
        return {
            i: places[0]
            for i, places in sorted(found.items())
            if len(places) == 1 and places[0] <= len(text)
        }

    def before_last(self, rendered: str) -> str | None:
        """The text that is rendered before the last tag."""
        matches = list(self._pattern.finditer(rendered))
        return self._pattern.sub("", rendered[: matches[-1].start()]) if matches else None

    def _tag(self, index: int) -> str:
        return f"{self._mark}x{index}z"

    def _tagged(self, index: int, message: Message) -> Message:
        content: str = message["content"]
        inner = content.rstrip()
        if not inner:
            return message  # a template may ask whether there is a content at all
        return {**message, "content": inner + self._tag(index) + content[len(inner) :]}

    def _begun(self, index: int, message: Message) -> Message:
        content: str = message["content"]
        inner = content.lstrip()
        if not inner:
            return message
        space = content[: len(content) - len(inner)]
        return {**message, "content": space + self._tag(index) + inner}
