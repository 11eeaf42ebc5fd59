"""A conversation in a terminal: its input, and the look of an answer."""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn
from rich.progress import Progress as ProgressBar

from rewarm.errors import NotPrivate, NotReady, RewarmError
from rewarm.generate.generation import Delta, Event, Prefilled, Reading
from rewarm.generate.generator import Generator
from rewarm.generate.options import GenerationOptions
from rewarm.private import check_file, private_folder
from rewarm.prompt.chat import chat_of
from rewarm.prompt.messages import Part
from rewarm.values import Cost, Message

log = logging.getLogger("rewarm")

PROMPT = "\x01\x1b[1m\x02>\x01\x1b[0m\x02 "
HELP = """\
/reset          forget the conversation
/system TEXT    set the system prompt (@FILE: from a file; nothing: none)
/undo           take back the last question and its answer
/help           this
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer. Arrow up brings back what you typed before."""

WORTH_A_BAR = 0.4
"""Seconds of prefill after which its progress is shown."""
HISTORY = 1000
"""The number of typed lines that are kept."""


@dataclass
class Conversation:
    generator: Generator
    options: GenerationOptions
    console: Console
    system: str | None = None
    questions: str | None = None
    """Questions that the model can answer, for /help."""
    messages: list[Message] = field(default_factory=list)
    _running: Reading | None = None

    def run(self) -> None:
        """Read lines and answer them, until Ctrl-D or /quit."""
        with _history():
            while True:
                try:
                    line = input(PROMPT).strip()
                except KeyboardInterrupt:
                    self._say("  (Ctrl-D or /quit leaves)")
                    continue
                except EOFError:
                    self.console.print()
                    return
                if line.partition(" ")[0] in ("/quit", "/exit"):
                    return
                if line.startswith("/"):
                    self._command(line)
                elif line:
                    with _on_interrupt(self._stop):
                        self._turn(line)

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    def _stop(self) -> None:
        """End the answer, and not the program."""
        if self._running is not None:
            self.generator.cancel(self._running)

    def _command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        match name:
            case "/reset":
                self.messages.clear()
                self._say("a new conversation")
            case "/undo":
                while self.messages and self.messages.pop()["role"] != "user":
                    pass
                turns = sum(message["role"] == "user" for message in self.messages)
                self._say(f"back to turn {turns}")
            case "/system":
                self._set_system(rest.strip())
            case "/help":
                self._say("\n\n".join(filter(None, (HELP, self.questions))), style="")
            case _:
                self._say(f"{name} is unknown: /help lists what there is", style="red")

    def _set_system(self, text: str) -> None:
        if text.startswith("@"):
            try:
                text = Path(text[1:]).expanduser().read_text()
            except (OSError, UnicodeDecodeError) as error:
                self._say(f"{text[1:]} cannot be read: {error}", style="red")
                return
        self.system = text.strip() or None
        self._say("system prompt set" if self.system else "no system prompt")

    def _turn(self, line: str) -> None:
        self.messages.append({"role": "user", "content": line})
        try:
            done = self._answer()
        except RewarmError as error:
            self.messages.pop()
            self._say(str(error), style="red")
            return
        answer = done.choices[0].answer
        if not answer.parts:
            self.messages.pop()  # stopped before its first word: the question is dropped too
            return
        self.messages.append(answer.message())
        # While the answer is read and the next line is typed, the next prompt is prepared.
        self.generator.answered(done, done.runs[0])

    def _answer(self) -> Reading:
        first: list[Message] = [{"role": "system", "content": self.system}] if self.system else []
        self._running = running = self.generator.start(chat_of(first + self.messages), self.options)
        self._show(self.generator.events(running))
        self._running = None
        run = running.runs[0]
        if run.cost is None:
            raise run.error or NotReady("the engine stopped")
        self._summarise(run.cost, run.choices[0].tokens)
        return running

    def _show(self, events: Iterator[Event]) -> None:
        """Print an answer as it comes. While a long prompt is computed, a bar is shown."""
        began = time.monotonic()
        columns = (TextColumn("[dim]reading"), BarColumn(), MofNCompleteColumn())
        bar = ProgressBar(*columns, console=self.console, transient=True)
        task = bar.add_task("")
        thought = False
        for event in events:
            if isinstance(event, Prefilled):
                if time.monotonic() - began > WORTH_A_BAR:
                    bar.start()
                bar.update(task, completed=event.done, total=event.total)
                continue
            if bar.live.is_started:
                bar.stop()
            for part in event.parts if isinstance(event, Delta) else ():
                if part.kind == "text" and thought:
                    self._write("\n")
                thought = part.kind == "thinking" or (thought and part.kind == "call")
                self._print(part)

    def _print(self, part: Part) -> None:
        if part.call is not None:
            self._write(f"\n{part.call['function']}", "cyan")
        else:
            self._write(part.text, "dim" if part.kind == "thinking" else None)

    def _write(self, text: str, style: str | None = None) -> None:
        """Print a text as it is: no markup, no wrapping, no end of line."""
        if text:
            self.console.print(
                text, style=style, end="", markup=False, highlight=False, soft_wrap=True
            )

    def _summarise(self, cost: Cost, tokens: int) -> None:
        match = cost.match
        again = f", {cost.replayed:,} again" if cost.replayed else ""
        self.console.print()
        self._say(
            f"{match.tokens:,} tokens: {match.resume:,} cached "
            f"({match.resume / match.tokens:.0%}){again}, {cost.prefilled - cost.replayed:,} new"
            f" · first token {cost.ttft_ms / 1e3:.2f} s · {tokens:,} written"
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
    """Edit lines, and keep what was typed. Without a line editor, do neither."""
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
    readline.set_history_length(HISTORY)
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
