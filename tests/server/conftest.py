"""Fixtures that tests of the server share. A file says in its own `running` what is served."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from browser import opened
from extras import needs


@pytest.fixture
def server(running, monkeypatch):
    """After the test nothing is left in it."""
    from server_tools import (
        PacedRunner,
    )  # it may import Triton: not before the other conftest.py runs

    runner = running.llm.runner
    is_paced = isinstance(runner, PacedRunner)
    if is_paced:
        runner.reset()
    yield running
    monkeypatch.undo()
    if is_paced:
        runner.free()
    running.check_idle()


@pytest.fixture
def openai():
    """The official client."""
    return needs("openai")


@pytest.fixture
def client(server, openai):
    with openai.OpenAI(base_url=server.url + "/v1", api_key="any", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    yield from opened(tmp_path_factory)


@pytest.fixture
def pool():
    with ThreadPoolExecutor(32) as pool:
        yield pool
