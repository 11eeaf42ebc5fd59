"""A chat in the terminal, on an engine of its own."""

from __future__ import annotations

import logging
import os
import queue
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rewarm.engine import Engine, Request
from rewarm.errors import InvalidPrompt, NotPrivate, NotReady, RewarmError
from rewarm.private import check_file, private_folder
from rewarm.prompt.parse.answer import Answer, Piece
from rewarm.prompt.render.renderer import ChatRenderer, Prompt
from rewarm.values import Cost, Finish, Message, Sampled, Sampling

log = logging.getLogger("rewarm")

HELP = """\
/reset          forget the conversation
/system TEXT    set the system prompt (@FILE: from a file; nothing: none)
/undo           take back the last question and its answer
/help           this
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer. Arrow up brings back what you typed before."""

WORTH_A_BAR = 0.4
"""Seconds of prefill after which its progress is shown."""


@dataclass(frozen=True)
class ChatOptions:
    system: str | None = None
    max_tokens: int = 2048
    sampling: Sampling = field(default_factory=Sampling)
    template: dict[str, Any] = field(default_factory=dict)
    warm_ahead: bool = True
    ask: str = ""
    """What this model can be asked, for /help."""


@dataclass(frozen=True)
class _Progress:
    done: int
    total: int


@dataclass(frozen=True)
class _End:
    report: Cost | None
    error: Exception | None = None


class _Sink:
    """From the engine's thread to the terminal's."""

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.tokens = 0
        self.events: queue.SimpleQueue[_Progress | Piece | _End] = queue.SimpleQueue()

    def prefilled(self, done: int, total: int) -> None:
        self.events.put(_Progress(done, total))

    def token(self, choice: int, sampled: Sampled) -> bool:
        self.tokens += 1
        piece = self.answer.add(sampled.token)
        self.events.put(piece)
        return piece.stop is not None

    def ended(self, choice: int, reason: Finish) -> None:
        self.events.put(self.answer.finish())

    def done(self, report: Cost) -> None:
        self.events.put(_End(report))

    def failed(self, error: Exception) -> None:
        self.events.put(_End(None, error))


class Chat:
    """The conversation, and how a turn of it looks."""

    def __init__(self, engine: Engine, options: ChatOptions, console: Console) -> None:
        self.engine = engine
        self.options = options
        self.console = console
        self.renderer = ChatRenderer(engine.tokenizer)
        self.system = options.system
        self.messages: list[Message] = []
        self._running: Request | None = None
        self._thinking = False

    def run(self) -> None:
        """Until Ctrl-D or /quit."""
        with _history():
            while True:
                try:
                    line = input("\x01\x1b[1m\x02>\x01\x1b[0m\x02 ").strip()
                except KeyboardInterrupt:
                    self.console.print("  [dim](Ctrl-D or /quit leaves)[/]")
                    continue
                except EOFError:
                    self.console.print()
                    return
                if line.startswith("/"):
                    if not self._command(line):
                        return
                elif line:
                    with _on_interrupt(self._stop):
                        self._turn(line)

    def _stop(self) -> None:
        """Ctrl-C: the answer ends, the program does not."""
        if self._running is not None:
            self.engine.cancel(self._running)

    def _command(self, line: str) -> bool:
        """Whether to go on."""
        name, _, rest = line.partition(" ")
        say = self.console.print
        if name in ("/quit", "/exit"):
            return False
        if name == "/reset":
            self.messages.clear()
            say("[dim]a new conversation[/]")
        elif name == "/undo":
            self._undo()
        elif name == "/system":
            self._set_system(rest.strip())
        elif name == "/help":
            say("\n\n".join(filter(None, (HELP, self.options.ask))), markup=False, highlight=False)
        else:
            say(f"{name} is unknown: /help lists what there is", style="red", markup=False)
        return True

    def _set_system(self, text: str) -> None:
        if text.startswith("@"):
            try:
                text = Path(text[1:]).expanduser().read_text()
            except (OSError, UnicodeDecodeError) as error:
                self.console.print(f"{text[1:]} cannot be read: {error}", style="red", markup=False)
                return
        self.system = text.strip() or None
        self.console.print(
            "[dim]system prompt set[/]" if self.system else "[dim]no system prompt[/]"
        )

    def _undo(self) -> None:
        while self.messages and self.messages.pop()["role"] != "user":
            pass
        turns = sum(m["role"] == "user" for m in self.messages)
        self.console.print(f"[dim]back to turn {turns}[/]")

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            prompt = self.renderer.render(self._chat(), **self._options())
            answer = Answer(self.engine.tokenizer, prompt.tokens[prompt.generation :])
            self._ask(prompt, answer)
        except RewarmError as error:
            self.messages.pop()
            self.console.print(str(error), style="red", markup=False)
            return
        if not (answer.text or answer.reasoning or answer.calls):
            self.messages.pop()  # stopped before it said anything: as if it was not asked
            return
        self.messages.append(answer.message())
        if self.options.warm_ahead:
            self._warm_ahead()

    def _ask(self, prompt: Prompt, answer: Answer) -> None:
        sink = _Sink(answer)
        self._thinking = False
        request = Request(
            tokens=prompt.tokens,
            sink=sink,
            max_tokens=self.options.max_tokens,
            sampling=self.options.sampling,
            boundaries=prompt.boundaries,
            end_tokens=frozenset(self.engine.tokenizer.eos_token_ids),
        )
        self._running = request
        self.engine.submit(request)
        end = self._show(sink)
        self._running = None
        if end.report is None:
            raise end.error or NotReady("the engine stopped")
        self._summary(end.report, sink.tokens)

    def _show(self, sink: _Sink) -> _End:
        """Print what comes: a bar while a long prompt is computed, then the answer."""
        began = time.monotonic()
        bar: Progress | None = None
        while True:
            event = sink.events.get()
            if isinstance(event, _Progress):
                if bar is None and time.monotonic() - began > WORTH_A_BAR:
                    columns = (TextColumn("[dim]reading"), BarColumn(), MofNCompleteColumn())
                    bar = Progress(*columns, console=self.console, transient=True)
                    bar.add_task("")
                    bar.start()
                if bar is not None:
                    bar.update(bar.task_ids[0], completed=event.done, total=event.total)
                continue
            if bar is not None:
                bar.stop()
                bar = None
            if isinstance(event, _End):
                return event
            self._print(event)

    def _print(self, piece: Piece) -> None:
        self._write(piece.reasoning, "dim")
        self._thinking |= bool(piece.reasoning)
        if piece.text and self._thinking:
            self._thinking = False
            self._write("\n")
        self._write(piece.text)
        for call in piece.calls:
            self._write(f"\n{call['function']}", "cyan")

    def _write(self, text: str, style: str | None = None) -> None:
        """As it is: no markup, no wrapping, no end of line."""
        if text:
            self.console.print(
                text, style=style, end="", markup=False, highlight=False, soft_wrap=True
            )

    def _summary(self, report: Cost, tokens: int) -> None:
        match = report.match
        new = report.prefilled - match.replay
        again = f", {match.replay:,} again" if match.replay else ""
        share = match.resume / match.tokens
        self.console.print(
            f"\n[dim]{match.tokens:,} tokens: {match.resume:,} cached ({share:.0%}){again}, "
            f"{new:,} new · first token {report.ttft_ms / 1e3:.2f} s · {tokens:,} written[/]"
        )

    def _warm_ahead(self) -> None:
        """While you read and type, the next prompt is prepared."""
        with suppress(InvalidPrompt):
            ahead = self.renderer.ahead(self._chat(), **self._options())
            if ahead is not None:
                self.engine.warm(ahead.tokens, ahead.boundaries)

    def _chat(self) -> list[Message]:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        return first + self.messages

    def _options(self) -> dict[str, Any]:
        return {"every_turn": self.engine.cache.reuse == "exact", **self.options.template}


@contextmanager
def _on_interrupt(call: Callable[[], None]) -> Iterator[None]:
    before = signal.signal(signal.SIGINT, lambda *_: call())
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def _history() -> Iterator[None]:
    """Line editing, and what was typed before; without either where the terminal has none."""
    try:
        import readline
    except ImportError:
        yield
        return
    path = None
    try:
        path = _history_file()
        readline.read_history_file(path)
    except NotPrivate as error:
        log.warning("what is typed is not kept: %s", error)
    except OSError:
        pass
    readline.set_history_length(1000)
    try:
        yield
    finally:
        if path is not None:
            with suppress(OSError):
                readline.write_history_file(path)


def _history_file() -> Path:
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
    path = private_folder(state / "rewarm") / "history"
    if path.is_symlink() or path.exists():
        check_file(path)
    path.touch(mode=0o600)
    return path
