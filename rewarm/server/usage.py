"""What a reply says of the work behind it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rewarm.generate.collect import Choice
from rewarm.values import Cost

from .work import Run


def rewarm_object(runs: Sequence[Run]) -> dict[str, Any]:
    """Of all prompts together; where there are several, the resume point is the first one's."""
    reports = [run.report for run in runs if run.report is not None]
    if not reports:
        return {}
    first = reports[0]
    resume = None
    if first.match.resume:
        resume = {
            "position": first.match.resume,
            "boundary": first.resumed_at,
            "tier": first.match.tier,
        }
    return {
        "cached_tokens": sum(r.match.resume for r in reports),
        "replayed_tokens": sum(replayed(r) for r in reports),
        "prefilled_tokens": sum(r.prefilled for r in reports),
        "resume": resume,
        "miss": miss_object(runs),
        "timings": {
            "queue_ms": round(first.queued_ms, 3),
            "match_ms": round(first.match_ms, 3),
            "restore_ms": round(first.restore_ms, 3),
            "prefill_ms": round(first.prefill_ms, 3),
            "ttft_ms": round(first.ttft_ms, 3),
        },
    }


def miss_object(runs: Sequence[Run]) -> dict[str, Any] | None:
    """Why not more of the first prompt was reused; None where all that could be was."""
    return next((run.miss for run in runs if run.report is not None), None)


def replayed(report: Cost) -> int:
    """A prefill that was cancelled may not have got through what it had to replay."""
    return min(report.match.replay, report.prefilled)


def openai_usage(runs: Sequence[Run]) -> dict[str, Any]:
    prompt = sum(len(run.prompt.tokens) for run in runs)
    cached = sum(run.report.match.resume for run in runs if run.report is not None)
    choices = [choice for run in runs for choice in run.choices]
    completion = sum(choice.tokens for choice in choices)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": cached},
        "completion_tokens_details": {
            "reasoning_tokens": sum(choice.reasoning_tokens for choice in choices)
        },
    }


def anthropic_usage(
    prompt: int, resume: int, last_mark: int | None, choice: Choice | None = None
) -> dict[str, Any]:
    """Anthropic counts every prompt token once: read from the cache, written to it because of a
    `cache_control` mark, or neither."""
    created = max(0, last_mark - resume) if last_mark is not None else 0
    return {
        "input_tokens": prompt - resume - created,
        "cache_creation_input_tokens": created,
        "cache_read_input_tokens": resume,
        "output_tokens": choice.tokens if choice is not None else 0,
    }
