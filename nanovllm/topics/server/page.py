"""The page at /, and how the frames of the live view reach the browsers."""

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path

from fastapi import FastAPI, Response
from starlette.routing import Route
from starlette.staticfiles import StaticFiles

from nanovllm.topics.server.answers import HEADERS, EventStream
from nanovllm.topics.server.async_llm import LONGEST_SILENCE, AsyncLLM
from nanovllm.topics.server.errors import Refused
from nanovllm.topics.server.live import LiveView

FOLDER = Path(__file__).parent / "page"
FILE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; img-src 'self' data:; base-uri 'none'; "
    "frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-cache",
}
FILES = (FOLDER, *FOLDER.rglob("*.*"))
PATHS = {"/" + path.relative_to(FOLDER).as_posix().removeprefix(".") for path in FILES}
WITHOUT_KEY = PATHS | {"/health"}  # the page asks for the key itself
MOST_WATCHERS = 20
MOST_FRAMES = 50  # that wait for a slow reader; then it is sent away


class Live:
    """Sends the engine's frames to all browsers that watch. Without one, none are made."""

    def __init__(self, engine: AsyncLLM):
        self.engine = engine
        self.view = LiveView(engine.llm, self._from_engine)
        self.readers: set[asyncio.Queue[str | None]] = set()

    # --- in the engine's thread ---

    def _from_engine(self, frame: dict) -> None:
        self.engine.loop.call_soon_threadsafe(self._pass_on, frame)

    # --- in the loop's ---

    def _pass_on(self, frame: dict | None) -> None:
        text = None if frame is None else json.dumps(frame, separators=(",", ":"))
        for reader in self.readers:
            if reader.full():
                # each frame needs the one before: it ends, and its browser connects again
                while not reader.empty():
                    reader.get_nowait()
                reader.put_nowait(None)
            reader.put_nowait(text)

    async def frames(self) -> AsyncGenerator[str, None]:
        """Frames for one reader, until it leaves or the server ends. The first item is empty."""
        self.engine.check_open()
        if len(self.readers) == MOST_WATCHERS:
            raise Refused(f"{MOST_WATCHERS} pages watch already", status=429)
        reader: asyncio.Queue[str | None] = asyncio.Queue(MOST_FRAMES)
        self.readers.add(reader)
        self.engine.on_idle = [self.view.flush]
        self.engine.inbox.put(self.view.start)
        try:
            yield ""
            while True:
                try:
                    frame = await asyncio.wait_for(reader.get(), LONGEST_SILENCE)
                except asyncio.TimeoutError:
                    yield ": the server lives\n\n"
                    continue
                if frame is None:
                    return
                yield f"data: {frame}\n\n"
        finally:
            self.readers.discard(reader)
            if not self.readers:
                self.engine.on_idle = []
                self.engine.inbox.put(self.view.stop)

    def close(self) -> None:
        self._pass_on(None)


class Files(StaticFiles):
    """The page's files, each with the headers."""

    def file_response(self, *args, **kwargs) -> Response:
        response = super().file_response(*args, **kwargs)
        response.headers.update(FILE_HEADERS)
        return response


def add_page(app: FastAPI) -> None:
    """Adds the page's files at the root. Each has a route of its own, so that all other paths stay
    unknown."""

    async def watch() -> Response:
        frames = app.state.server.live.frames()
        await anext(frames)
        return EventStream(frames, headers=HEADERS)

    app.add_api_route("/live", watch, response_model=None, include_in_schema=False)
    files = Files(directory=FOLDER, html=True)
    for path in PATHS:
        app.router.routes.append(Route(path, files))
