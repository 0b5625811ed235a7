"""A plugin for pytest: engines attend by mapped memory unless they are told otherwise.

    PYTHONPATH=tests/tools pytest -p vattention_default tests/core/test_recovery.py

So whatever holds for paging in software is asked of vAttention, too.
"""

from nanovllm.config import Config

Config.attention_backend = "vattention"
Config.__init__.__kwdefaults__["attention_backend"] = "vattention"
