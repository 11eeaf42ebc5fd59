"""A miss in words and figures: what `rewarm.miss` says."""

from __future__ import annotations

from typing import Any

from rewarm.prompt.render.renderer import Prompt
from rewarm.values import Message, Miss, Tokens

from .place import Place, place_of

AROUND = 24
"""Tokens that are shown on each side of a difference."""
SHOWN = 60
"""Characters of them."""

WHY = {
    "never_taken": "no checkpoint was taken between them",
    "evicted": "the checkpoint there was evicted",
    "other_origin": "what lies between was generated, and only the end of an answer is kept",
}


def described(
    miss: Miss,
    prompt: Prompt,
    tokenizer: Any,
    chat: list[Message] | None = None,
    tools: list[Any] | None = None,
) -> dict[str, Any]:
    """`chat` is normalised; None for plain text."""
    size = len(prompt.tokens)
    body: dict[str, Any] = {
        "reason": miss.reason,
        "shared": miss.shared,
        "resume": miss.resume,
        "tokens": size - miss.resume,
    }
    if miss.reason == "diverged":
        body |= _difference(miss, prompt, tokenizer, chat, tools)
    elif miss.reason == "no_checkpoint":
        body |= {"tokens": miss.shared - miss.resume, "why": miss.why}
    elif miss.reason == "exact_mode":
        body["tokens"] = miss.shared - miss.resume
    elif miss.reason in ("evicted", "salt", "other_model"):
        body |= {"tokens": miss.held - miss.resume, "held": miss.held}
    body["text"] = _text(miss, body)
    return body


def _difference(
    miss: Miss,
    prompt: Prompt,
    tokenizer: Any,
    chat: list[Message] | None,
    tools: list[Any] | None,
) -> dict[str, Any]:
    at, size = miss.shared, len(prompt.tokens)
    stored = _words(tokenizer, miss.other[:AROUND])
    sent = _words(tokenizer, prompt.tokens[at : at + AROUND])
    place = None
    if chat is not None:
        place = place_of(tokenizer, prompt, chat, tools, at)
        place = _thinking(tokenizer, place, prompt, chat, stored, sent)
    return {
        "position": at,
        "tokens": size - at,
        "message": place.message if place else None,
        "role": place.role if place else None,
        "field": place.field if place else None,
        "before": _words(tokenizer, prompt.tokens[max(0, at - AROUND) : at], end=True),
        "stored": stored,
        "sent": sent,
    }


def _thinking(
    tokenizer: Any, place: Place, prompt: Prompt, chat: list[Message], stored: str, sent: str
) -> Place:
    """Where one side begins to think and the other does not, the thinking is what differs."""
    mark = getattr(tokenizer, "think_start", None)
    if not mark or place.role not in ("assistant", None):
        return place
    if stored.lstrip().startswith(mark) == sent.lstrip().startswith(mark):
        return place
    message = place.message
    if message is None and place.field != "generation":
        return place
    return Place("reasoning_content", message, "assistant")


def _words(tokenizer: Any, tokens: Tokens, *, end: bool = False) -> str:
    """What tokens say; the ends of characters that were cut are left out."""
    text = str(tokenizer.decode(tokens.tolist())).strip("\ufffd") if len(tokens) else ""
    return text[-SHOWN:] if end else text[:SHOWN]


def _text(miss: Miss, body: dict[str, Any]) -> str:
    lost = f"{body['tokens']:,} tokens"
    if miss.reason == "cold":
        return "Nothing that begins like this prompt is known."
    if miss.reason == "diverged":
        where = _where(body)
        return f"It differs from what is stored at token {miss.shared:,}{where}."
    if miss.reason == "no_checkpoint":
        why = WHY.get(miss.why or "", "")
        return (
            f"{miss.shared:,} tokens are known, but the model can go on from {miss.resume:,} only: "
            f"{why}. {lost} are computed again."
        )
    if miss.reason == "evicted":
        return f"{miss.held:,} tokens of it were held and had to go. {lost} are computed again."
    if miss.reason == "salt":
        return (
            f"Under another salt {miss.held:,} tokens of it could be reused; salts share nothing."
        )
    if miss.reason == "other_model":
        return (
            f"{miss.held:,} tokens of it, at least, are on disk, but of another model or in "
            "another form."
        )
    if miss.reason == "exact_mode":
        return f"In exact mode only whole chunks are reused. {lost} are computed again."
    if miss.reason == "disabled":
        return "This model's caches cannot be captured: reuse is off."
    return "What was stored could not be restored; it is computed again."


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
