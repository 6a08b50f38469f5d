"""The offline model: an endpoint of our own that speaks the OpenAI Responses API, without any model behind it.

`--offline`, the tests and load tests talk to it over real HTTP. With `scriptable=True` it also misbehaves on demand. It
must not know Redis, the worker or the chat service.
"""

from memora.offline_model.endpoint import OfflineModel

__all__ = ["OfflineModel"]
