"""A plugin for pytest: engines launch a step before the tokens of the last one are read.

    PYTHONPATH=tests/tools pytest -p overlap_default tests/core/test_recovery.py

So whatever holds for one step after the other is asked of two steps in flight, too.
"""

from nanovllm.config import Config

Config.overlap = True
Config.__init__.__kwdefaults__["overlap"] = True
