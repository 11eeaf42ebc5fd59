"""Find the places of messages in a rendered chat, by one more render with tags in the contents.

If that render without its tags is equal to the first one, the template has only copied the
contents, and the tags are where the messages begin or end.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from itertools import accumulate

from rewarm.errors import InvalidPrompt
from rewarm.values import Message


class Tags:
    """Tags that occur in no text, since they are drawn by chance."""

    def __init__(self) -> None:
        # Letters and digits only, which no template escapes, trims or splits.
        self._mark = f"R{secrets.token_hex(8)}"
        self._pattern = re.compile(f"{self._mark}x([0-9]+)z")

    def tagged(self, chat: list[Message], *, begin: bool = False, continued: bool) -> list[Message]:
        """Put a tag at the end of each content, or at its beginning, within the white space around
        it. Where the last message is `continued`, a tag at the very end keeps the white space
        there."""
        tagged = [self._tagged(i, message, begin) for i, message in enumerate(chat)]
        if continued:
            last = tagged[-1] if begin else chat[-1]
            tag = self._tag(len(chat) if begin else len(chat) - 1)
            tagged[-1] = {**last, "content": last["content"] + tag}
        return tagged

    def places(self, rendered: str, text: str, *, whole: bool = True) -> dict[int, int]:
        """Find the places of the tags in the text, in characters, by message. Without `whole`, the
        text is only the beginning of what was rendered."""
        # Texts and the numbers of the tags between them, in turn.
        parts = self._pattern.split(rendered)
        untagged = "".join(parts[::2])
        if not untagged.startswith(text) or (whole and untagged != text):
            return {}
        indices = [int(index) for index in parts[1::2]]
        found = zip(indices, accumulate(map(len, parts[::2])), strict=False)
        # A tag that is written twice has no place.
        times = Counter(indices)
        return {i: at for i, at in sorted(found) if times[i] == 1 and at <= len(text)}

    def before_last(self, rendered: str) -> str:
        """Give the text that is rendered before the last tag. Raises InvalidPrompt where there is
        none."""
        parts = self._pattern.split(rendered)
        if len(parts) == 1:
            raise InvalidPrompt(
                "the chat template leaves out the last message, which is to be continued"
            )
        return "".join(parts[:-1:2])

    def _tag(self, index: int) -> str:
        return f"{self._mark}x{index}z"

    def _tagged(self, index: int, message: Message, begin: bool) -> Message:
        content: str = message["content"]
        inner = content.lstrip() if begin else content.rstrip()
        if not inner:
            return message  # a template may check whether there is a content at all
        space = len(content) - len(inner)
        at = space if begin else len(inner)
        return {**message, "content": content[:at] + self._tag(index) + content[at:]}
