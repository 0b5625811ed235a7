"""A plugin for pytest: engines have the options of the variable DEFAULTS unless they are told otherwise.

    DEFAULTS='{"overlap": true}' PYTHONPATH=tests/tools pytest -p other_defaults tests/core/test_recovery.py

So whatever holds for one step after the other is asked of two steps in flight, too.
"""

import json
import os

from nanovllm.config import Config

for name, value in json.loads(os.environ["DEFAULTS"]).items():
    setattr(Config, name, value)
    Config.__init__.__kwdefaults__[name] = value
