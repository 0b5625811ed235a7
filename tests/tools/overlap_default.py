"""A plugin for pytest: servers believe that each device computes behind the host, as a GPU does.

    PYTHONPATH=tests/tools pytest -p asynchronous_default tests/server/test_server.py

So whatever holds for news that are made at once is asked of news that are made in the next step, too.
"""

from fake_model import FakeRunner
from server_tools import Parrot

from nanovllm.model_runner import ModelRunner

plain_init = ModelRunner.__init__


def new_init(self, *args):
    plain_init(self, *args)
    self.is_asynchronous = True


ModelRunner.__init__ = new_init
FakeRunner.is_asynchronous = True
Parrot.is_asynchronous = True
