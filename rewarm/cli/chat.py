"""`rewarm chat`: a chat in the terminal, on an engine of its own."""

from __future__ import annotations

import atexit
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from rewarm import pocket
from rewarm.errors import NotPrivate, NotReady, RewarmError
from rewarm.generate.options import GenerationOptions
from rewarm.options import CacheOptions, EngineOptions, ModelOptions, ServerOptions
from rewarm.private import check_file, private_folder
from rewarm.prompt.chat import chat_of
from rewarm.values import Message, Sampling

from .serve import Model, engine_of
from .spread import spread

if TYPE_CHECKING:
    from rewarm.generate.generation import Event, Reading
    from rewarm.generate.generator import Generator

log = logging.getLogger("rewarm")

PROMPT = "\x01\x1b[1m\x02>\x01\x1b[0m\x02 "
HELP = """\
/reset          forget the conversation
/system TEXT    set the system prompt (@FILE: from a file; nothing: none)
/undo           take back the last question and its answer
/help           this
/quit           leave (or Ctrl-D)
Ctrl-C stops an answer. Arrow up brings back what you typed before."""

STYLES = {"thinking": "dim", "call": "cyan"}
"""The style of each kind of part; a text has none."""

WORTH_A_BAR = 0.4
"""Seconds of prefill after which its progress is shown."""
HISTORY = 1000
"""The number of typed lines that are kept."""


@spread
def chat(
    model: Model = pocket.BUILT_IN,
    system: Annotated[str | None, typer.Option(help="A system prompt.")] = None,
    max_tokens: Annotated[int, typer.Option(min=1, help="The longest answer.")] = 2048,
    temperature: Annotated[
        float, typer.Option(min=0, help="0 is always the likeliest.")
    ] = Sampling.temperature,
    top_p: Annotated[float, typer.Option(min=0, max=1)] = Sampling.top_p,
    seed: Annotated[int | None, typer.Option(help="For answers that can be repeated.")] = None,
    *,
    server: Annotated[ServerOptions, "chat_template_args", "warm_ahead"],
    engine: Annotated[EngineOptions, "context"],
    cache: CacheOptions,
    source: ModelOptions,
) -> None:
    """Chat with a model in the terminal, and see what each turn reused."""
    from rewarm.generate.generator import Generator

    console = Console()
    built_in = model == pocket.BUILT_IN
    sampling = Sampling(temperature=temperature, top_p=top_p, seed=seed)
    running = engine_of(model, engine, cache, source)
    conversation = Conversation(
        Generator(running, server),
        GenerationOptions(max_tokens=max_tokens, sampling=sampling, stream=True),
        console,
        system=pocket.TABLE if built_in and system is None else system,
        questions=pocket.ASK if built_in else None,
    )
    with console.status(f"loading {model}"):
        running.start()
        state = running.wait()
    try:
        if state != "ready":
            raise NotReady(running.detail)
        hint = "/help says what to ask it" if built_in else "/help lists the commands"
        console.print(f"[bold]{model}[/]  [dim]{hint}, Ctrl-D leaves[/]")
        conversation.run()
    finally:
        running.stop()


@dataclass
class Conversation:
    """A conversation in the terminal: its input, and the look of an answer."""

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
        _keep_history()
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
                usual = signal.signal(signal.SIGINT, self._stop)
                try:
                    self._turn(line)
                finally:
                    signal.signal(signal.SIGINT, usual)

    def _say(self, text: str, style: str = "dim") -> None:
        self.console.print(text, style=style, markup=False, highlight=False)

    def _stop(self, *_: object) -> None:
        """End the answer, and not the program, after Ctrl-C."""
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
        run = running.runs[0]
        if run.cost is None:
            raise run.error or NotReady("the engine stopped")
        cost, match = run.cost, run.cost.match
        again = f", {cost.replayed:,} again" if cost.replayed else ""
        self.console.print()
        self._say(
            f"{match.tokens:,} tokens: {match.resume:,} cached "
            f"({match.resume / match.tokens:.0%}){again}, {cost.prefilled - cost.replayed:,} new"
            f" · first token {cost.ttft_ms / 1e3:.2f} s · {run.choices[0].tokens:,} written"
        )
        return running

    def _show(self, events: Iterator[Event]) -> None:
        """Print an answer as it comes. While a long prompt is computed, a bar is shown."""
        from rewarm.generate.generation import Delta, Prefilled

        began = time.monotonic()
        columns = (TextColumn("[dim]reading"), BarColumn(), MofNCompleteColumn())
        bar = Progress(*columns, console=self.console, transient=True)
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
                text = part.text if part.call is None else f"\n{part.call['function']}"
                if part.kind == "text" and thought:
                    text = f"\n{text}"
                thought = part.kind == "thinking" or (thought and part.kind == "call")
                style = STYLES.get(part.kind)
                self.console.out(text, style=style, end="", highlight=False)


def _keep_history() -> None:
    """Edit lines, and keep what was typed. Without a line editor, do neither."""
    try:
        import readline

        state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state")
        path = private_folder(state / "rewarm") / "history"
        if os.path.lexists(path):
            check_file(path)
        path.touch(mode=0o600)
    except NotPrivate as error:
        log.warning("what is typed is not kept: %s", error)
    except (ImportError, OSError):
        pass
    else:
        with suppress(OSError):
            readline.read_history_file(path)
        readline.set_history_length(HISTORY)
        atexit.register(readline.write_history_file, path)
