"""Put a miss in words and figures, for the field `rewarm.miss` of a reply."""

from __future__ import annotations

from typing import Any

from rewarm.prompt.chat import Chat
from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Miss, Reason, Tokens

from .place import Location, locate

AROUND = 24
"""The tokens that are shown on each side of a difference."""
SHOWN = 60
"""The most characters that are shown of them."""

WHY = {
    "never_taken": "no checkpoint was taken between them",
    "evicted": "the checkpoint there was evicted",
    "other_origin": "what lies between was generated, and only the end of an answer is kept",
}


def described(
    miss: Miss, prompt: Prompt, tokenizer: Any, chat: Chat | None = None
) -> dict[str, Any]:
    """Describe a miss for a reply. `chat` is None for plain text."""
    size = len(prompt.tokens)
    body: dict[str, Any] = {
        "reason": miss.reason,
        "shared": miss.shared,
        "resume": miss.resume,
        "tokens": size - miss.resume,
    }
    if miss.reason == "diverged":
        body |= _difference(miss, prompt, tokenizer, chat)
    elif miss.reason == "no_checkpoint":
        body |= {"tokens": miss.shared - miss.resume, "why": miss.why}
    elif miss.reason == "exact_mode":
        body["tokens"] = miss.shared - miss.resume
    elif miss.reason in ("evicted", "salt", "other_model"):
        body |= {"tokens": miss.held - miss.resume, "held": miss.held}
    body["text"] = _text(miss, body)
    return body


def _difference(miss: Miss, prompt: Prompt, tokenizer: Any, chat: Chat | None) -> dict[str, Any]:
    at, size = miss.shared, len(prompt.tokens)
    stored = _words(tokenizer, miss.other[:AROUND])
    sent = _words(tokenizer, prompt.tokens[at : at + AROUND])
    place = None
    if chat is not None:
        place = locate(tokenizer, prompt, chat.messages, chat.tools, at)
        place = _thinking(tokenizer, place, stored, sent)
    return {
        "position": at,
        "tokens": size - at,
        **{name: getattr(place, name, None) for name in ("message", "role", "field")},
        "before": _words(tokenizer, prompt.tokens[max(0, at - AROUND) : at], end=True),
        "stored": stored,
        "sent": sent,
    }


def _thinking(tokenizer: Any, place: Location, stored: str, sent: str) -> Location:
    """Move a difference into the thinking, if only one of the two sides begins to think."""
    mark = getattr(tokenizer, "think_start", None)
    if not mark or place.role not in ("assistant", None):
        return place
    if stored.lstrip().startswith(mark) == sent.lstrip().startswith(mark):
        return place
    message = place.message
    if message is None and place.field != "generation":
        return place
    return Location("reasoning_content", message, "assistant")


def _words(tokenizer: Any, tokens: Tokens, *, end: bool = False) -> str:
    """Decode tokens, without characters at the ends that are cut in two."""
    text = str(tokenizer.decode(tokens.tolist())).strip("\ufffd") if len(tokens) else ""
    return text[-SHOWN:] if end else text[:SHOWN]


TEXTS: dict[Reason, str] = {
    "cold": "Nothing that begins like this prompt is known.",
    "diverged": "It differs from what is stored at token {shared:,}{where}.",
    "no_checkpoint": "{shared:,} tokens are known, but the model can go on from {resume:,} only: "
    "{why}. {lost} are computed again.",
    "evicted": "{held:,} tokens of it were held and had to go. {lost} are computed again.",
    "salt": "Under another salt {held:,} tokens of it could be reused; salts share nothing.",
    "other_model": "{held:,} tokens of it, at least, are on disk, but of another model or in "
    "another form.",
    "exact_mode": "In exact mode only whole chunks are reused. {lost} are computed again.",
    "disabled": "This model's caches cannot be captured: reuse is off.",
    "failed": "What was stored could not be restored; it is computed again.",
}


def _text(miss: Miss, body: dict[str, Any]) -> str:
    return TEXTS[miss.reason].format(
        shared=miss.shared,
        resume=miss.resume,
        held=miss.held,
        why=WHY.get(miss.why or "", ""),
        where=_where(body),
        lost=f"{body['tokens']:,} tokens",
    )


def _where(body: dict[str, Any]) -> str:
    field = body.get("field")
    if field is None:
        return ""
    if field == "generation":
        return ", where the answer begins"
    if field in ("tools", "template"):
        return f", in the {'tools' if field == 'tools' else 'words of the chat template'}"
    if body["message"] is None:
        return f", in the {field} of the answer"
    return f", in the {field} of message {body['message']} ({body['role']})"
