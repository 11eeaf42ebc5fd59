"""Generate text. Every API and command does it this way."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from collections.abc import Generator as Events
from dataclasses import replace
from functools import cached_property
from typing import Any

from rewarm.cache.model import checked_tokens
from rewarm.engine import Core, Engine, PromptPath, Request
from rewarm.errors import InvalidOption
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.parse.answer import Answer
from rewarm.prompt.parse.readers import initial_state
from rewarm.prompt.parse.texts import TokenTexts
from rewarm.prompt.render.renderer import ChatRenderer, Prompt

from .generation import Choice, Emit, Event, Generation, PromptRun, Reading
from .options import GenerationOptions

log = logging.getLogger("rewarm")


class NoToolCalls(InvalidOption):
    """A tool call is required, and this model's tool calls cannot be recognised."""

    param = "tool_choice"


class Generator:
    """A generator makes prompts of chats, runs them on an engine, and makes answers of tokens.

    The engine may still be loading: until it is ready, methods that need it raise NotReady. A core
    without a thread of its own is turned on the thread that reads the events.
    """

    def __init__(
        self,
        engine: Engine | Core,
        options: ServerOptions | None = None,
        between: Callable[[float], None] | None = None,
    ) -> None:
        """`options` has the template's options, the longest answer, and whether the next turn is
        warmed. `between` is called with the seconds between two tokens."""
        self.engine = engine
        self.options = options or ServerOptions()
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

    # Events, one by one.

    def start(self, asked: Chat | Text, options: GenerationOptions) -> Reading:
        """Start an answer. `events` gives its events."""
        generation = Reading(asked, options)
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
                if (event := self._next(generation)) is not None:
                    yield event
        finally:
            self.cancel(generation)
            while generation.pending:
                self._next(generation)

    def turn(self) -> None:
        """Turn a core that has no thread. An exception ends all that runs, and is raised."""
        self.core.wait()  # a fetch from a lower tier may be under way
        try:
            self.core.turn()
        except BaseException as error:
            self.core.recover(error, keep=False)
            raise

    def _next(self, generation: Reading) -> Event | None:
        """Wait for the next event and take it. None where a turn of the core brought none."""
        if generation.events.empty() and isinstance(self.engine, Core):
            self.turn()
            if generation.events.empty():
                return None
        event = generation.events.get()
        generation.take(event)
        return event

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
            run = PromptRun(number, prompt, choices, options, emit, self.between)
            if isinstance(asked, Text) and asked.echo:
                given = asked.prompts[number]
                run.echo = given if isinstance(given, str) else self.tokenizer.decode(list(given))
            generation.runs.append(run)
            generation.requests.append(self._request(run, chat))

    def submit(self, generation: Generation) -> None:
        """Queue the requests: all of them, or none. Raises what the engine's `submit` does."""
        wanted, most = len(generation.choices), self.core.options.max_queue
        if wanted > most:
            raise InvalidOption(f"{wanted} answers at once: the queue takes {most}; ask for fewer")
        try:
            for number, request in enumerate(generation.requests):
                self.core.submit(request)
                generation.pending.add(number)
        except Exception:
            self.cancel(generation)
            raise

    def cancel(self, generation: Generation) -> None:
        """Stop what still runs. What was computed is kept."""
        for number in generation.pending:
            self.core.cancel(generation.requests[number])

    def answered(self, generation: Generation, run: PromptRun) -> None:
        """Prepare the cache for the next turn, once a run is over. This takes a while."""
        if generation.chat is None:
            return
        prompt, salt = run.prompt, generation.options.salt
        try:
            if all(choice.finish == "stop" for choice in run.choices):
                # A tool's result comes in seconds, a person's next message in minutes.
                self.core.mark_idle(PromptPath(prompt.tokens, prompt.boundaries, salt))
            chat = generation.with_answer(run) if self.options.warm_ahead else None
            if chat is not None:
                every_turn = self.core.cache.reuse == "exact"
                ahead = self.renderer.ahead(self._whole(chat), every_turn=every_turn)
                if ahead is not None:
                    self.core.warm(PromptPath(ahead.tokens, ahead.boundaries, salt))
        except Exception:
            log.debug("no warm-ahead for this answer", exc_info=True)

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
        if not self.options.chat_template_args:
            return chat
        return replace(chat, template={**self.options.chat_template_args, **chat.template})

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
        must_call = chat is not None and chat.must_call
        answer = prompt.tokens[prompt.generation :]
        thinks = must_call and initial_state(self.tokenizer, answer) == "reasoning"
        return Request(
            tokens=prompt.tokens,
            sink=run,
            max_tokens=options.max_tokens or self.options.max_answer,
            sampling=options.sampling,
            n=options.n,
            boundaries=prompt.boundaries,
            marks=prompt.marks,
            top_logprobs=options.top_logprobs,
            end_tokens=run.choices[0].answer.ends,
            opening=tuple(self.tokenizer.tool_call_start_tokens) if must_call else (),
            opens_after=tuple(self.tokenizer.think_end_tokens or ()) if thinks else (),
            salt=options.salt,
            hint=options.hint,
        )
