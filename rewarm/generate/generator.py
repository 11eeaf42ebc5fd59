"""Generate text. Every API and command does it this way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Generator as Events
from dataclasses import replace
from functools import cached_property
from queue import SimpleQueue
from typing import Any, Protocol

from rewarm.cache.model import checked_tokens
from rewarm.engine import Core, Engine, PromptPath, Request
from rewarm.errors import InvalidOption
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.parse.texts import TokenTexts
from rewarm.prompt.render.renderer import ChatRenderer, Prompt

from .generation import Choice, Emit, Event, Generation, PromptRun, Reading
from .options import GenerationOptions

log = logging.getLogger("rewarm")


class Pump(Protocol):
    def next(self, events: SimpleQueue[Event]) -> Event | None:
        """Wait for the next event, on the reader's thread. With None, call it again."""


class ThreadPump:
    """A pump for an engine that has a thread of its own."""

    def next(self, events: SimpleQueue[Event]) -> Event:
        return events.get()


class CallerPump:
    """A pump that turns the engine on the reader's own thread.

    An exception in a turn ends all that runs, and is raised to the reader.
    """

    def __init__(self, core: Core) -> None:
        self.core = core

    def next(self, events: SimpleQueue[Event]) -> Event | None:
        if events.empty():
            self.turn()
        return None if events.empty() else events.get()

    def warm_up(self) -> None:
        """Turn until all warm-ahead is computed."""
        while self.core.stats().warm_waiting:
            self.turn()

    def turn(self) -> None:
        self.core.wait()  # a fetch from a lower tier may be under way
        try:
            self.core.turn()
        except BaseException as error:
            self.core.recover(error, keep=False)
            raise


class NoToolCalls(InvalidOption):
    """A tool call is required, and this model's tool calls cannot be recognised."""

    param = "tool_choice"


class Generator:
    """A generator makes prompts of chats, runs them on an engine, and makes answers of tokens.

    The engine may still be loading: until it is ready, methods that need it raise NotReady.
    """

    def __init__(
        self,
        engine: Engine | Core,
        pump: Pump | None = None,
        *,
        template: Mapping[str, Any] | None = None,
        max_answer: int = ServerOptions.max_answer,
        warm_ahead: bool = True,
        between: Callable[[float], None] | None = None,
    ) -> None:
        """`template`: options of the chat template, unless a chat sets others. `max_answer`: the
        longest answer in tokens, unless another limit is asked for. `between` is called with the
        seconds between two tokens."""
        self.engine = engine
        self.pump = pump or ThreadPump()
        self.template = template
        self.max_answer = max_answer
        self.warm_ahead = warm_ahead
        self.between = between

    @property
    def core(self) -> Core:
        """The engine's part that takes requests. Raises NotReady until the model is loaded."""
        return self.engine.core if isinstance(self.engine, Engine) else self.engine

    @property
    def tokenizer(self) -> Any:
        return self.core.tokenizer

    @cached_property
    def renderer(self) -> ChatRenderer:
        return ChatRenderer(self.tokenizer)

    @cached_property
    def texts(self) -> TokenTexts:
        return TokenTexts(self.tokenizer)

    @cached_property
    def end_tokens(self) -> frozenset[int]:
        return frozenset(int(token) for token in self.tokenizer.eos_token_ids)

    # Events, one by one.

    def generate(
        self, asked: Chat | Text, options: GenerationOptions | None = None
    ) -> Iterator[Event]:
        """Answer, event by event."""
        return self.events(self.start(asked, options))

    def start(self, asked: Chat | Text, options: GenerationOptions | None = None) -> Reading:
        """Start an answer. `events` gives its events."""
        generation = Reading(asked, options or GenerationOptions(stream=True))
        self.prepare(generation, generation.events.put)
        self.submit(generation)
        return generation

    def events(
        self, generation: Reading, cancel: threading.Event | None = None
    ) -> Events[Event, None, None]:
        """Give the events up to the end. Closing this early stops the work, and so does `cancel`;
        what was computed is kept."""
        try:
            while generation.pending:
                if cancel is not None and cancel.is_set():
                    self.cancel(generation)
                if (event := self.pump.next(generation.events)) is not None:
                    generation.take(event)
                    yield event
        finally:
            self.cancel(generation)
            while generation.pending:
                if (event := self.pump.next(generation.events)) is not None:
                    generation.take(event)

    # Steps of an answer. The first takes a while; none of them waits for the engine.

    def prepare(self, generation: Generation, emit: Emit) -> None:
        """Make the prompts, and the objects that read their answers. Events go to `emit`."""
        asked, options = generation.asked, generation.options
        chat = generation.chat
        if chat is not None and chat.must_call and not self.tokenizer.has_tool_calling:
            raise NoToolCalls(
                "tool_choice: this model's tool calls cannot be recognised, so none can be "
                'required; use "auto" or "none"'
            )
        for number, prompt in enumerate(self.prompts(asked)):
            choices = [Choice(self._answer(prompt, chat, options)) for _ in range(options.n)]
            run = PromptRun(number, prompt, choices, options, self.end_tokens, emit, self.between)
            if isinstance(asked, Text) and asked.echo:
                given = asked.prompts[number]
                run.echo = given if isinstance(given, str) else self.tokenizer.decode(list(given))
            generation.runs.append(run)
            generation.pending[number] = self._request(run, chat)

    def submit(self, generation: Generation) -> None:
        """Queue the requests: all of them, or none. Raises what the engine's `submit` does."""
        wanted, most = len(generation.choices), self.core.options.max_queue
        for number, request in list(generation.pending.items()):
            try:
                if wanted > most:
                    raise InvalidOption(
                        f"{wanted} answers at once: the queue takes {most}; ask for fewer"
                    )
                self.core.submit(request)
            except Exception:
                for later in range(number, len(generation.runs)):
                    del generation.pending[later]
                del generation.runs[number:]
                self.cancel(generation)
                raise

    def cancel(self, generation: Generation) -> None:
        """Stop what still runs. What was computed is kept."""
        for request in list(generation.pending.values()):
            self.core.cancel(request)

    def answered(self, generation: Generation, run: PromptRun) -> None:
        """Prepare the cache for the next turn, once a run is over. This takes a while."""
        chat = generation.chat
        if chat is None:
            return
        prompt, salt = run.prompt, generation.options.salt
        try:
            if all(choice.finish == "stop" for choice in run.choices):
                # A tool's result comes in seconds, a person's next message in minutes.
                self.core.mark_idle(PromptPath(prompt.tokens, prompt.boundaries, salt))
            ahead = self.ahead(generation, run) if self.warm_ahead else None
            if ahead is not None:
                self.core.warm(PromptPath(ahead.tokens, ahead.boundaries, salt))
        except Exception:
            log.debug("no warm-ahead for this answer", exc_info=True)

    def ahead(self, generation: Generation, run: PromptRun) -> Prompt | None:
        """Render the beginning of the next turn's prompt, where an answer has ended by itself or
        with a tool call."""
        chat, choice = generation.chat, run.choices[0]
        if chat is None or len(run.choices) > 1 or run.error is not None:
            return None
        if choice.finish not in ("stop", "tool_calls"):
            return None
        answer = chat.returned(choice.answer)
        before = chat.messages
        if chat.continue_final:
            *before, begun = before
            answer["content"] = f"{begun['content']}{answer['content']}"
        said = replace(self._whole(chat), messages=[*before, answer], continue_final=False)
        return self.renderer.ahead(said, every_turn=self.core.cache.reuse == "exact")

    # Prompts and answers.

    def prompts(self, asked: Chat | Text) -> list[Prompt]:
        if isinstance(asked, Chat):
            return [self.render(asked)]
        vocabulary = self.core.cache.vocabulary
        return [Prompt(checked_tokens(self._tokens(t), vocabulary)) for t in asked.prompts]

    def render(self, chat: Chat) -> Prompt:
        # The grid of `exact` uses the boundaries of every turn.
        every_turn = self.core.cache.reuse == "exact"
        return self.renderer.prompt(self._whole(chat), every_turn=every_turn)

    def _whole(self, chat: Chat) -> Chat:
        if not self.template:
            return chat
        return replace(chat, template={**self.template, **chat.template})

    def _tokens(self, given: str | Sequence[int]) -> Sequence[int]:
        if not isinstance(given, str):
            return given
        bos = self.tokenizer.bos_token
        special = bos is None or not given.startswith(bos)
        tokens: Sequence[int] = self.tokenizer.encode(given, add_special_tokens=special)
        return tokens

    def _answer(self, prompt: Prompt, chat: Chat | None, options: GenerationOptions) -> Answer:
        return Answer(
            self.tokenizer,
            # Only the generation prompt can open the thinking, not a text of the user.
            prompt.tokens[prompt.generation :],
            tools=chat.tools if chat is not None else None,
            stop=options.stop,
            raw=chat is None,
            continued=chat is not None and chat.continue_final,
            one_call=options.one_call,
        )

    def _request(self, run: PromptRun, chat: Chat | None) -> Request:
        prompt, options = run.prompt, run.options
        # The room that the prompt leaves in the context. If there is none, the engine refuses the
        # request.
        left = max(1, self.core.context - len(prompt.tokens))
        must_call = chat is not None and chat.must_call
        return Request(
            tokens=prompt.tokens,
            sink=run,
            max_tokens=min(options.max_tokens or self.max_answer, left),
            sampling=options.sampling,
            n=options.n,
            boundaries=prompt.boundaries,
            marks=prompt.marks,
            top_logprobs=options.top_logprobs,
            end_tokens=self.end_tokens,
            opening=tuple(self.tokenizer.tool_call_start_tokens) if must_call else (),
            opens_after=self._end_of_thinking(prompt) if must_call else (),
            salt=options.salt,
            hint=options.hint,
        )

    def _end_of_thinking(self, prompt: Prompt) -> tuple[int, ...]:
        """Give the tokens that end the thinking, where the prompt leaves it open."""
        if not self.tokenizer.has_thinking:
            return ()
        tokens = prompt.tokens[prompt.generation :].tolist()
        if self.tokenizer.rfind_think_start(tokens) > self.tokenizer.rfind_think_end(tokens):
            return tuple(self.tokenizer.think_end_tokens)
        return ()
