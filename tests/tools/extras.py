"""What not every machine has: a test that needs it is skipped with a reason.

Modules that come with an extra of pyproject.toml: a test of what is not installed is skipped, and names the extra.
Others exist for some systems only.

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
    "properdocs": "site",
    "pygments": "site",
    "ray": "ray",
    "jupytext": "notebooks",
    "nbclient": "notebooks",
    "matplotlib": "dev",
    "openai": "dev",
}


ON_SOME_SYSTEMS = ("triton", "pty")


def needs(module: str) -> ModuleType:
    """The module; skips the test if it is not installed."""
    return pytest.importorskip(module, reason=reason(module))


def reason(module: str) -> str:
    if module in ON_SOME_SYSTEMS:
        return f"needs {module}, which this system does not have"
    return f"needs the extra '{EXTRAS[module]}': {module} is not installed"


class File(pytest.Module):
    """A file of tests, skipped as a whole if it imports what is not installed."""

    def collect(self):
        try:
            return super().collect()
        except self.CollectError as error:
            missing = getattr(error.__cause__, "name", None)
            if missing not in (*EXTRAS, *ON_SOME_SYSTEMS):
                raise
            pytest.skip(reason(missing), allow_module_level=True)
        except SystemExit as error:  # the grader says which system it needs
            pytest.skip(str(error), allow_module_level=True)
