"""A chat in the terminal, on an engine of its own."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from rewarm.engine import Engine
from rewarm.errors import NotPrivate, NotReady, RewarmError
from rewarm.generate.generation import Delta, Event, Progress, Reading
from rewarm.generate.generator import Generator
from rewarm.generate.options import GenerationOptions
from rewarm.private import check_file, private_folder
from rewarm.prompt.chat import chat_of
from rewarm.prompt.messages import Part
from rewarm.values import Cost, Message, Sampling

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
    """Questions that this model can be asked, for /help."""


class Conversation:
    """The conversation, and how a turn of it looks."""

    def __init__(self, engine: Engine, options: ChatOptions, console: Console) -> None:
        self.engine = engine
        self.options = options
        self.console = console
        self.generator = Generator(engine, warm_ahead=options.warm_ahead)
        self.system = options.system
        self.messages: list[Message] = []
        self._running: Reading | None = None
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
            self.generator.cancel(self._running)

    def _command(self, line: str) -> bool:
        """Carry out a command; false where it ends the chat."""
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
            done = self._answered()
        except RewarmError as error:
            self.messages.pop()
            self.console.print(str(error), style="red", markup=False)
            return
        answer = done.choices[0].answer
        if not answer.parts:
            self.messages.pop()  # stopped before it said anything: as if it was not asked
            return
        self.messages.append(answer.message())
        # While you read and type, the next prompt is prepared.
        self.generator.answered(done, done.runs[0])

    def _answered(self) -> Reading:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        chat = chat_of(first + self.messages, template=self.options.template)
        options = GenerationOptions(
            max_tokens=self.options.max_tokens, sampling=self.options.sampling, stream=True
        )
        self._thinking = False
        self._running = running = self.generator.start(chat, options)
        self._show(self.generator.events(running))
        self._running = None
        run = running.runs[0]
        if run.cost is None:
            raise run.error or NotReady("the engine stopped")
        self._summary(run.cost, run.choices[0].tokens)
        return running

    def _show(self, events: Iterator[Event]) -> None:
        """Print what comes: a bar while a long prompt is computed, then the answer."""
        began = time.monotonic()
        bar: ProgressBar | None = None
        for event in events:
            if isinstance(event, Progress):
                if bar is None and time.monotonic() - began > WORTH_A_BAR:
                    columns = (TextColumn("[dim]reading"), BarColumn(), MofNCompleteColumn())
                    bar = ProgressBar(*columns, console=self.console, transient=True)
                    bar.add_task("")
                    bar.start()
                if bar is not None:
                    bar.update(bar.task_ids[0], completed=event.done, total=event.total)
                continue
            if bar is not None:
                bar.stop()
                bar = None
            if isinstance(event, Delta):
                for part in event.parts:
                    self._print(part)

    def _print(self, part: Part) -> None:
        if part.call is not None:
            self._write(f"\n{part.call['function']}", "cyan")
        elif part.kind == "thinking":
            self._thinking = True
            self._write(part.text, "dim")
        else:
            if self._thinking:
                self._thinking = False
                self._write("\n")
            self._write(part.text)

    def _write(self, text: str, style: str | None = None) -> None:
        """As it is: no markup, no wrapping, no end of line."""
        if text:
            self.console.print(
                text, style=style, end="", markup=False, highlight=False, soft_wrap=True
            )

    def _summary(self, cost: Cost, tokens: int) -> None:
        match = cost.match
        new = cost.prefilled - match.replay
        again = f", {match.replay:,} again" if match.replay else ""
        share = match.resume / match.tokens
        self.console.print(
            f"\n[dim]{match.tokens:,} tokens: {match.resume:,} cached ({share:.0%}){again}, "
            f"{new:,} new · first token {cost.ttft_ms / 1e3:.2f} s · {tokens:,} written[/]"
        )


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
