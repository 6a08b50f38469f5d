"""The application: the API's routes over one set of services, and what runs around them.

Owns what is put together, and that turns are answered for as long as it runs. Must not answer anything itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI

from memora import __version__
from memora.bootstrap import Memora
from memora.conversations import ConversationService
from memora.web import completions, conversations, memory, models, responses
from memora.web.api import Api
from memora.web.errors import install_error_handlers
from memora.web.operations import install
from memora.web.turns import Turns


def create_app(memora: Memora) -> FastAPI:
    """Build the application over open services.

    Raises:
        SettingsError: the settings would let strangers in.
    """
    turns = Turns(memora.settings.shutdown_grace_seconds)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        async with turns.running():
            yield

    # The pages that FastAPI can show load their scripts from elsewhere.
    app = FastAPI(
        title="Memora",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.api = Api(memora, ConversationService(memora.settings, memora.store, memora.chat), turns)
    install_error_handlers(app)
    for module in (responses, memory, conversations, completions, models):
        app.include_router(module.router)
    app.state.turns = turns
    install(app, memora)
    turns.on_turn, turns.on_turn_failed = app.state.on_turn, app.state.on_turn_failed
    return app
