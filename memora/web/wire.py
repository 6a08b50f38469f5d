"""What clients send: the bodies of requests as OpenAI has them, as far as Memora reads them.

Owns the names, types and limits of the fields. What Memora does not know is ignored; what it knows and has not is
refused where it is read. Must not answer anything.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

_MOST_INTEGER = 2**31 - 1

Name = Annotated[str, Field(max_length=256)]
Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]
Positive = Annotated[int, Field(ge=1, le=_MOST_INTEGER)]
Temperature = Annotated[float, Field(ge=0, le=2)]
Share = Annotated[float, Field(ge=0, le=1)]
Penalty = Annotated[float, Field(ge=-2, le=2)]


class Loose(BaseModel):
    """A body that may hold more than is read of it; what is read has to be of its type."""

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Part(Loose):
    """A part of a message's content; only text can be read."""

    type: str | None = None
    text: str | None = None
    refusal: str | None = None


class Item(Loose):
    """A message; items of another `type` are refused."""

    type: str | None = None
    role: str | None = None
    content: str | list[Part] | None = None
    phase: str | None = None


class ConversationRef(Loose):
    """A conversation by its id."""

    id: str


class Asked(Loose):
    """What a response and the count of its input have in common."""

    model: Name | None = None
    input: str | list[Item] | None = None
    instructions: str | None = None
    conversation: str | ConversationRef | None = None
    previous_response_id: str | None = None
    reasoning: dict[str, Any] | None = None
    text: dict[str, Any] | None = None
    tools: list[Any] | None = None
    prompt: dict[str, Any] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def conversation_id(self) -> str | None:
        """The id, in whichever form it came."""
        return self.conversation.id if isinstance(self.conversation, ConversationRef) else self.conversation


class ResponseRequest(Asked):
    """`POST /v1/responses`."""

    stream: bool | None = None
    metadata: Metadata | None = None
    max_output_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    background: bool | None = None
    include: list[Any] | None = None


class ConversationRequest(Loose):
    """`POST /v1/conversations`."""

    items: list[Item] | None = None
    metadata: Metadata | None = None


class MetadataRequest(Loose):
    """`POST /v1/conversations/{id}`."""

    metadata: Metadata | None


class ItemsRequest(Loose):
    """`POST /v1/conversations/{id}/items`."""

    items: Annotated[list[Item], Field(min_length=1)]


class RollbackRequest(Loose):
    """`POST /v1/conversations/{id}/memory/rollback`."""

    version: Annotated[int, Field(ge=0, le=_MOST_INTEGER)]


class ChatMessage(Loose):
    """A message of a chat completion."""

    role: str
    content: str | list[Part] | None = None
    tool_calls: list[Any] | None = None


class StreamOptions(Loose):
    """What a stream shall hold besides the answer."""

    include_usage: bool | None = None


class ResponseFormat(Loose):
    """The form an answer shall have."""

    type: str
    json_schema: dict[str, Any] | None = None


class CompletionRequest(Loose):
    """`POST /v1/chat/completions`."""

    model: Name | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    max_tokens: Positive | None = None
    max_completion_tokens: Positive | None = None
    temperature: Temperature | None = None
    top_p: Share | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: bool | None = None
    reasoning_effort: str | None = None
    verbosity: str | None = None
    response_format: ResponseFormat | None = None
    metadata: Metadata | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    tools: list[Any] | None = None
    functions: list[Any] | None = None
    audio: dict[str, Any] | None = None
    modalities: list[str] | None = None
