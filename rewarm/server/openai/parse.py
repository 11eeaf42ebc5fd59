"""Parse OpenAI's requests into chats and texts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WrapValidator, model_validator

from rewarm.generate.options import RETURNING, GenerationOptions
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.messages import assistant_message, tool_message
from rewarm.values import Message

from .. import fields
from ..errors import ApiError, bad_request
from ..fields import Body, RequestBody, Unsupported, one_of, refuse

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""

NOT_BUILT_IN = "this way of sampling is not built in; leave it out"
NO_GRAMMAR = Unsupported("answers cannot be constrained to a grammar or schema; leave it out")
NO_SEARCH = Unsupported("this server has no tools of its own; leave it out")
UNSUPPORTED = {
    **dict.fromkeys(("structured_outputs", "grammar", "json_schema", "regex"), NO_GRAMMAR),
    **dict.fromkeys(
        (
            *("use_beam_search", "min_tokens", "ignore_eos", "include_stop_str_in_output"),
            *("prompt_logprobs", "truncate_prompt_tokens", "logits_processors", "dry_multiplier"),
            *("repetition_context_size", "xtc_probability", "mirostat"),
        ),
        Unsupported(NOT_BUILT_IN, (0, 0.0, False, [])),
    ),
    "typical_p": Unsupported(NOT_BUILT_IN, (1, 1.0)),
    "functions": Unsupported("use tools", ([],)),
    "function_call": Unsupported("use tool_choice"),
    "web_search_options": NO_SEARCH,
    "moderation": NO_SEARCH,
    "audio": Unsupported("this server writes text only"),
    "modalities": Unsupported(
        'this server writes text only: leave it out or send ["text"]', (["text"],)
    ),
    "prediction": Unsupported("leave it out"),
    "response_format": Unsupported(
        'answers cannot be constrained yet: leave it out or send {"type": "text"}',
        ({"type": "text"},),
    ),
    "verbosity": Unsupported("ask for it in a message", ("medium",)),
    "thinking": Unsupported("use reasoning_effort or enable_thinking"),
    "chat_template": Unsupported("the model's own template is used"),
    "documents": Unsupported("put them into a message", ([],)),
    "add_generation_prompt": Unsupported("an answer always begins a message", (True,)),
    "suffix": Unsupported("text can be continued at its end only", ("",)),
    "best_of": Unsupported("use n", (1,)),
    "adapters": Unsupported("an adapter is chosen when the server starts"),
    "stop_token_ids": Unsupported("use stop", ([],)),
    "bad_words": Unsupported("use logit_bias", ([],)),
    "allowed_token_ids": Unsupported("use logit_bias", ([],)),
}
UNSUPPORTED_IN_CONTINUED = {k: v for k, v in UNSUPPORTED.items() if k != "add_generation_prompt"}
"""An answer that goes on has no generation prompt."""

UNSUPPORTED_IN_MESSAGES = {
    "function_call": Unsupported("use tool_calls"),
    "audio": Unsupported("this server reads text only"),
}


class TextPart(Body):
    type: one_of("text", "refusal", advice="this server reads text parts only")  # type: ignore[valid-type]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> TextPart:
        if self.words is None:
            raise ValueError(f"a {self.type} part needs {self.type!r}")
        return self

    @property
    def words(self) -> str | None:
        return self.text if self.type == "text" else self.refusal


class Function(Body):
    name: Annotated[str, Field(min_length=1)]
    arguments: str | dict[str, Any]


class ToolCall(Body):
    id: str
    type: Literal["function"] = "function"
    function: Function

    def as_call(self) -> dict[str, Any]:
        called = {"name": self.function.name, "arguments": self.function.arguments}
        return {"id": self.id, "type": "function", "function": called}


class ChatMessage(Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    name: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    prefix: bool | None = None
    partial: bool | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        refuse(self.model_extra, UNSUPPORTED_IN_MESSAGES)
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    def as_message(self) -> Message:
        """Make the canonical message."""
        given = self.content or ""
        text = given if isinstance(given, str) else "".join(part.words or "" for part in given)
        if self.role == "tool":
            return tool_message(text, self.tool_call_id, self.name)
        if self.role == "assistant":
            calls = [call.as_call() for call in self.tool_calls or ()]
            message = assistant_message(text, self.reasoning_content or self.reasoning or "", calls)
        else:
            message = {"role": self.role, "content": text}
        if self.name is not None:
            message["name"] = self.name
        return message


class NamedFunction(Body):
    name: str


class FunctionTool(Body):
    type: Literal["function"]
    function: NamedFunction


def _checked_tool(tool: Any, check: Callable[[Any], object]) -> Any:
    """Check a tool and keep it as it was sent, since the model reads its keys in that order."""
    if isinstance(tool, dict) and tool.get("type") != "function":
        raise ValueError(f'tools of type {tool.get("type")!r} are not supported: use "function"')
    check(tool)
    return tool


class StreamOptions(Body):
    include_usage: bool | None = None


TopK = Annotated[int, Field(ge=-1, le=fields.MOST_TOKENS), AfterValidator(lambda k: max(0, k))]
LogitBias = Annotated[
    dict[Annotated[str, Field(pattern="^[0-9]{1,9}$")], Annotated[float, Field(ge=-100, le=100)]],
    Field(max_length=4096),
    AfterValidator(lambda biases: {int(token): bias for token, bias in biases.items()}),
]


class OpenAIRequest(RequestBody):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: fields.TokenCount | None = None
    stop: fields.StopText | Annotated[list[fields.StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None
    temperature: fields.Temperature | None = None
    top_p: fields.Fraction | None = None
    top_k: TopK | None = None
    min_p: fields.Fraction | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: fields.Penalty | None = None
    frequency_penalty: fields.Penalty | None = None
    logit_bias: LogitBias | None = None
    seed: fields.Seed | None = None
    cache_salt: fields.Salt | None = None
    """Prompts with different salts share nothing."""

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(self) -> GenerationOptions:
        return GenerationOptions(
            sampling=fields.sampling_of(self),
            n=self.n or 1,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            salt=self.cache_salt,
            hint=RETURNING if self.prompt_cache_key else 1.0,
            stream=bool(self.stream),
        )


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: fields.TokenCount | None = None
    tools: list[Annotated[FunctionTool, WrapValidator(_checked_tool)]] | None = None
    tool_choice: Literal["none", "auto", "required"] | FunctionTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: fields.Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: fields.TemplateOptions | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        refuse(self.model_extra, UNSUPPORTED_IN_CONTINUED if self.continues else UNSUPPORTED)
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continues and self.messages[-1].role != "assistant":
            raise bad_request("only a last message of the assistant can be continued", "messages")
        if self.continues and self.messages[-1].tool_calls:
            raise bad_request("a message with tool calls cannot be continued", "messages")
        return self

    @property
    def continues(self) -> bool:
        """The answer goes on with the last message."""
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)

    def asked(self, server: ServerOptions) -> Chat:
        given = self.tool_choice or "auto"
        mode, name = (given, None) if isinstance(given, str) else ("required", given.function.name)
        template = fields.thinking_options(self.reasoning_effort, self.enable_thinking)
        template.update(self.chat_template_kwargs or ())
        return Chat(
            messages=[message.as_message() for message in self.messages],
            tools=fields.chosen_tools(self.tools, mode, name),
            template=template,
            continue_final=self.continues,
            must_call=mode == "required",
        )

    def options(self) -> GenerationOptions:
        return replace(
            super().options(),
            max_tokens=self.max_completion_tokens or self.max_tokens,
            top_logprobs=(self.top_logprobs or 0) if self.logprobs else None,
            one_call=self.parallel_tool_calls is False,
        )


Token = Annotated[int, Field(ge=0, lt=1 << 31)]
Tokens = Annotated[list[Token], Field(min_length=1)]
TokenLists = Annotated[list[Tokens], Field(min_length=1, max_length=64)]
Texts = Annotated[list[str], Field(min_length=1, max_length=64)]


class CompletionRequest(OpenAIRequest):
    prompt: str | Tokens | Texts | TokenLists
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        refuse(self.model_extra, UNSUPPORTED)
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not supported: leave one of them out", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str) or isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def asked(self, server: ServerOptions) -> Text:
        return Text(self.prompts, bool(self.echo))

    def options(self) -> GenerationOptions:
        limit = self.max_tokens or COMPLETION_TOKENS
        return replace(super().options(), max_tokens=limit, top_logprobs=self.logprobs)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    """Make the body of an error."""
    usual = "invalid_request_error" if error.status < 500 else "server_error"
    kind = "rate_limit_error" if error.status == 429 else usual
    told = {"message": error.message, "type": kind, "param": error.param, "code": error.code}
    return {"error": told}
