"""Every error Memora raises on purpose.

                            MemoraError
        +---------------------+-----------------------+
    CallerError            StoreError              ModelError
    the caller must        Redis is the            the model is
    change something       matter                  the matter
     |- SettingsError       |- StoreUnavailable     |- ModelUnavailable (retryable)
     |- AddressUnavailable  |- StoreRefused         |- ModelTimeout     (retryable)
     |- InvalidId           `- ConversationDamaged  |- ModelDenied      (the key is wrong)
     |- InvalidMessage                              |- ModelRefused     (this request will never pass)
     |- ContextLengthExceeded                        `- OutputUnusable   (an answer that is no answer)
     |- ConversationNotFound
     |- ConversationDeleted
     |- ConversationLocked   (retryable)
     |- ConversationMovedOn
     |- MessageSummarized
     `- IdempotencyKeyReused

The branch says whose fault it is and `retryable` whether trying the same again can help. An expected outcome (a fold
that lost its race, nothing to fold) is a value, never one of these. Foreign exceptions become these in exactly one
place per foreign system: `llm` for OpenAI, `redis_connection` for Redis.
"""

from __future__ import annotations


class MemoraError(Exception):
    """The root; `code` is the stable name that scripts and the API see."""

    code = "error"
    retryable = False


class CallerError(MemoraError):
    """Something the caller sent or set has to change."""

    code = "invalid_request"


class SettingsError(CallerError):
    """A setting has a value that cannot work."""

    code = "invalid_settings"


class AddressUnavailable(CallerError):
    """The server cannot listen where it was told to."""

    code = "address_unavailable"


class InvalidId(CallerError):
    """A conversation id outside `[A-Za-z0-9_-]{1,128}`."""

    code = "invalid_conversation_id"


class InvalidMessage(CallerError):
    """A message that is empty, too long, or not text that can be encoded."""

    code = "invalid_message"


class ContextLengthExceeded(CallerError):
    """The current message alone does not fit into the input budget."""

    code = "context_length_exceeded"


class ConversationNotFound(CallerError):
    """No conversation has this id."""

    code = "conversation_not_found"


class ConversationDeleted(CallerError):
    """The conversation was deleted while this turn was being answered; the turn was not stored."""

    code = "conversation_deleted"


class ConversationLocked(CallerError):
    """Another turn of this conversation is being answered.

    `retry_after` is when its lock runs out at the latest, in seconds.
    """

    code = "conversation_locked"
    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ConversationMovedOn(CallerError):
    """The turn that was to be continued is not the newest of its conversation any more."""

    code = "previous_response_not_newest"


class MessageSummarized(CallerError):
    """A message cannot be taken back: the summary stands for it already."""

    code = "item_summarized"


class IdempotencyKeyReused(CallerError):
    """An idempotency key came again with another request."""

    code = "idempotency_key_reused"


class StoreError(MemoraError):
    """Redis cannot do what was asked."""

    code = "storage_error"


class StoreUnavailable(StoreError):
    """Redis cannot be reached, or did not answer in time."""

    code = "storage_unavailable"
    retryable = True


class StoreRefused(StoreError):
    """Redis answers, but refuses to write or to let us in: full, read-only, or the wrong password."""

    code = "storage_unavailable"
    retryable = True


class ConversationDamaged(StoreError):
    """A stored record is not what it should be. Names the key; nothing was changed."""

    code = "conversation_damaged"

    def __init__(self, key: str, problem: str) -> None:
        super().__init__(f"{key}: {problem}. Nothing was changed; look at the key with redis-cli.")
        self.key = key


class ModelError(MemoraError):
    """The model gave no usable answer."""

    code = "upstream_error"


class ModelUnavailable(ModelError):
    """The model's endpoint is unreachable, overloaded or broken for now.

    `retry_after` is how long it asked us to wait, in seconds; None if it did not say.
    """

    retryable = True

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class ModelTimeout(ModelError):
    """The model did not finish before its deadline."""

    code = "upstream_timeout"
    retryable = True


class ModelDenied(ModelError):
    """The model's endpoint does not accept the API key."""

    code = "upstream_denied"


class ModelRefused(ModelError):
    """The model's endpoint rejects this very request, and would again."""

    code = "upstream_refused"


class OutputUnusable(ModelError):
    """The call went through, but what came back cannot be used: empty, cut off, a refusal, an echo."""

    code = "upstream_output_unusable"
    retryable = True
