"""A plugin for pytest: engines propose draft tokens unless they are told otherwise.

    PYTHONPATH=tests/tools pytest -p drafts_default tests/processing

So whatever holds for steps that give each sequence one token is asked of steps that may give it several, too.
"""

from nanovllm.config import Config

Config.speculative_config = {"prompt_lookup_min": 1}
Config.__init__.__kwdefaults__["speculative_config"] = Config.speculative_config
