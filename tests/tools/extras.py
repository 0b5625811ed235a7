"""Modules that come with an extra of pyproject.toml: a test of what is not installed is skipped, and names the extra.

A file of tests imports such a module as any other, and is skipped as a whole if it is missing. Where only a test needs
it, this test or its fixture asks: `needs("openai")`.
"""

from types import ModuleType

import pytest

EXTRAS = {
    "fastapi": "server",
    "prometheus_client": "server",
    "uvicorn": "server",
    "llguidance": "structured",
    "numba": "cpu",
    "httpx": "test",
    "hypothesis": "test",
    "jsonschema": "test",
    "ray": "ray",
    "matplotlib": "dev",
    "openai": "dev",
}


def needs(module: str) -> ModuleType:
    """The module; skips the test if it is not installed."""
    return pytest.importorskip(module, reason=reason(module))


def reason(module: str) -> str:
    return f"needs the extra '{EXTRAS[module]}': {module} is not installed"


class File(pytest.Module):
    """A file of tests, skipped as a whole if it imports what is not installed."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None)
            if missing not in EXTRAS:
                raise
            pytest.skip(reason(missing), allow_module_level=True)
