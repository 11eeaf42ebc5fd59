"""OpenAI's requests, and the chats and texts that they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, WithJsonSchema, model_validator

from rewarm.generate.options import RETURNING, GenerationOptions
from rewarm.options import ServerOptions
from rewarm.prompt.chat import Chat, Text
from rewarm.prompt.messages import assistant_message, tool_message
from rewarm.values import Message

from ..errors import ApiError, bad_request
from ..fields import (
    Asked,
    Body,
    Effort,
    Refused,
    Sampled,
    StopText,
    TemplateOptions,
    TokenCount,
    one_of,
    refuse,
    thinking_options,
)

COMPLETION_TOKENS = 16
"""OpenAI's default for plain completions."""

CONSTRAINED = Refused("answers cannot be constrained to a grammar or schema; leave it out")
OTHER_SAMPLING = Refused("this way of sampling is not built in; leave it out", (0, 0.0, False, []))
REFUSED_IN_MESSAGES = {
    "function_call": Refused("use tool_calls"),
    "audio": Refused("this server reads text only"),
}
NO_SEARCH = Refused("this server has no tools of its own; leave it out")
REFUSED = {
    "functions": Refused("use tools", ([],)),
    "function_call": Refused("use tool_choice"),
    "web_search_options": NO_SEARCH,
    "audio": Refused("this server writes text only"),
    "modalities": Refused(
        'this server writes text only: leave it out or send ["text"]', (["text"],)
    ),
    "prediction": Refused("leave it out"),
    "moderation": NO_SEARCH,
    "response_format": Refused(
        'answers cannot be constrained yet: leave it out or send {"type": "text"}',
        ({"type": "text"},),
    ),
    "structured_outputs": CONSTRAINED,
    "grammar": CONSTRAINED,
    "json_schema": CONSTRAINED,
    "regex": CONSTRAINED,
    "verbosity": Refused("ask for it in a message", ("medium",)),
    "thinking": Refused("use reasoning_effort or enable_thinking"),
    "chat_template": Refused("the model's own template is used"),
    "documents": Refused("put them into a message", ([],)),
    "add_generation_prompt": Refused("an answer always begins a message", (True,)),
    "suffix": Refused("text can be continued at its end only", ("",)),
    "best_of": Refused("use n", (1,)),
    "adapters": Refused("an adapter is chosen when the server starts"),
    "use_beam_search": OTHER_SAMPLING,
    "min_tokens": OTHER_SAMPLING,
    "ignore_eos": OTHER_SAMPLING,
    "stop_token_ids": Refused("use stop", ([],)),
    "bad_words": Refused("use logit_bias", ([],)),
    "allowed_token_ids": Refused("use logit_bias", ([],)),
    "include_stop_str_in_output": OTHER_SAMPLING,
    "prompt_logprobs": OTHER_SAMPLING,
    "truncate_prompt_tokens": OTHER_SAMPLING,
    "logits_processors": OTHER_SAMPLING,
    "repetition_context_size": OTHER_SAMPLING,
    "typical_p": Refused(OTHER_SAMPLING.advice, (1, 1.0)),
    "xtc_probability": OTHER_SAMPLING,
    "mirostat": OTHER_SAMPLING,
    "dry_multiplier": OTHER_SAMPLING,
}


REFUSED_IN_CONTINUED = {k: v for k, v in REFUSED.items() if k != "add_generation_prompt"}
"""There is none where an answer goes on."""


class TextPart(Body):
    type: one_of("text", "refusal", advice="this server reads text parts only")  # type: ignore[valid-type]
    text: str | None = None
    refusal: str | None = None

    @model_validator(mode="after")
    def _has_its_text(self) -> TextPart:
        if getattr(self, str(self.type)) is None:
            raise ValueError(f"a {self.type} part needs {self.type!r}")
        return self

    @property
    def words(self) -> str:
        return self.text if self.type == "text" and self.text is not None else self.refusal or ""


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
        refuse(self.model_extra, REFUSED_IN_MESSAGES)
        if self.content is None and self.role != "assistant":
            raise ValueError(f"a {self.role} message needs content")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.words for part in self.content)
        return self.content or ""

    def as_message(self) -> Message:
        if self.role == "tool":
            return tool_message(self.text, self.tool_call_id, self.name)
        if self.role == "assistant":
            calls = [call.as_call() for call in self.tool_calls or ()]
            message = assistant_message(
                self.text, self.reasoning_content or self.reasoning or "", calls
            )
        else:
            message = {"role": self.role, "content": self.text}
        if self.name is not None:
            message["name"] = self.name
        return message


def _function_tool(tool: dict[str, Any]) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f'tools of type {tool.get("type")!r} are not supported: use "function"')
    function = tool.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise ValueError("a tool needs a function with a name")
    return tool


# Kept as it was sent: its order of keys is what the model reads.
Tool = Annotated[
    dict[str, Any],
    AfterValidator(_function_tool),
    WithJsonSchema(
        {
            "type": "object",
            "required": ["type", "function"],
            "properties": {
                "type": {"const": "function"},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {"type": "string"},
                        "description": {"type": "string"},
                        "parameters": {"type": "object"},
                    },
                },
            },
        }
    ),
]


class NamedFunction(Body):
    name: str


class NamedTool(Body):
    type: Literal["function"]
    function: NamedFunction


class StreamOptions(Body):
    include_usage: bool | None = None


class OpenAIRequest(Sampled):
    model: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: TokenCount | None = None
    stop: StopText | Annotated[list[StopText], Field(max_length=16)] | None = None
    n: Annotated[int, Field(ge=1, le=16)] | None = None
    user: str | None = None
    prompt_cache_key: str | None = None

    @model_validator(mode="after")
    def _supported(self) -> OpenAIRequest:
        refuse(self.model_extra, self.refused)
        return self

    @property
    def refused(self) -> Mapping[str, Refused]:
        return REFUSED

    @property
    def usage_in_stream(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    def options(
        self, max_tokens: int | None, top_logprobs: int | None, one_call: bool = False
    ) -> GenerationOptions:
        return GenerationOptions(
            max_tokens=max_tokens,
            sampling=self.sampling(),
            n=self.n or 1,
            stop=(self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ()),
            top_logprobs=top_logprobs,
            one_call=one_call,
            salt=self.cache_salt,
            hint=RETURNING if self.prompt_cache_key else 1.0,
            stream=bool(self.stream),
        )


class ChatRequest(OpenAIRequest):
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: TokenCount | None = None
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    reasoning_effort: Effort | None = None
    enable_thinking: bool | None = None
    chat_template_kwargs: TemplateOptions | None = None
    continue_final_message: bool | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs is not None and not self.logprobs:
            raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
        if self.continues and self.messages[-1].role != "assistant":
            raise bad_request("only a last message of the assistant can be continued", "messages")
        if self.continues and self.messages[-1].tool_calls:
            raise bad_request("a message with tool calls cannot be continued", "messages")
        if not self.tools and self.tool_choice not in (None, "none", "auto"):
            raise bad_request("tool_choice needs tools", "tool_choice")
        return self

    @property
    def continues(self) -> bool:
        last = self.messages[-1]
        return bool(self.continue_final_message or last.prefix or last.partial)

    @property
    def refused(self) -> Mapping[str, Refused]:
        return REFUSED_IN_CONTINUED if self.continues else REFUSED

    def chat(self) -> Chat:
        tools, must_call = self._shown()
        template = thinking_options(self.reasoning_effort, self.enable_thinking)
        template.update(self.chat_template_kwargs or ())
        return Chat(
            messages=[message.as_message() for message in self.messages],
            tools=tools,
            template=template,
            continue_final=self.continues,
            must_call=must_call,
        )

    def _shown(self) -> tuple[list[dict[str, Any]] | None, bool]:
        """The tools that the model is shown; true where it has to call one."""
        if not self.tools or self.tool_choice == "none":
            return None, False
        if not isinstance(self.tool_choice, NamedTool):
            return self.tools, self.tool_choice == "required"
        name = self.tool_choice.function.name
        named = [tool for tool in self.tools if tool["function"]["name"] == name]
        if not named:
            raise bad_request(
                f"tool_choice: there is no tool {name[:80]!r} in tools", "tool_choice"
            )
        return named[:1], True


Token = Annotated[int, Field(ge=0, lt=1 << 31)]


class CompletionRequest(OpenAIRequest):
    prompt: (
        str
        | Annotated[list[Token], Field(min_length=1)]
        | Annotated[list[str], Field(min_length=1, max_length=64)]
        | Annotated[
            list[Annotated[list[Token], Field(min_length=1)]], Field(min_length=1, max_length=64)
        ]
    )
    echo: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> CompletionRequest:
        if self.echo and self.logprobs is not None:
            raise bad_request("echo with logprobs is not supported: leave one of them out", "echo")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)


def parse_chat(
    body: bytes, server: ServerOptions, schema: type[ChatRequest] = ChatRequest
) -> Asked:
    asked = schema.model_validate_json(body)
    limit = asked.max_completion_tokens or asked.max_tokens
    top_logprobs = (asked.top_logprobs or 0) if asked.logprobs else None
    options = asked.options(limit, top_logprobs, asked.parallel_tool_calls is False)
    return Asked(asked.chat(), options, asked)


def parse_completion(
    body: bytes, server: ServerOptions, schema: type[CompletionRequest] = CompletionRequest
) -> Asked:
    asked = schema.model_validate_json(body)
    options = asked.options(asked.max_tokens or COMPLETION_TOKENS, asked.logprobs)
    return Asked(Text(asked.prompts, bool(asked.echo)), options, asked)


def error_body(error: ApiError, request_id: str) -> dict[str, Any]:
    if error.status == 429:
        kind = "rate_limit_error"
    else:
        kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {
        "error": {
            "message": error.message,
            "type": kind,
            "param": error.param,
            "code": error.code,
        }
    }
