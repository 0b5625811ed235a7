"""Policies that know nothing of any subject: no assignment may give them half of its goal points.

An author tries a new load with them (`seeds.py`). What else is silly for one assignment stands in a
file of its own, as a subclass of `Silly`. The first line of a docstring is the name in a table.
"""

from random import Random

from nanovllm import Router
from nanovllm.scheduler import Scheduler


class Silly(Scheduler):
    is_silly = True


class LastFirst(Silly):
    """last first"""

    def priority(self, request):
        return -request.arrival


class ShortestPrompt(Silly):
    """shortest prompt first"""

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival


class TinyBudget(Silly):
    """at most 64 tokens per step"""

    def step_budget(self):
        return min(64, self.max_num_batched_tokens), 64


class OnePrompt(Silly):
    """one prompt at a time"""

    def may_admit(self, request, schedule):
        return not any(one.is_prefilling for one in self.running)


class FewRunning(Silly):
    """at most half of the seats"""

    def may_admit(self, request, schedule):
        return 2 * len(self.running) < self.max_num_seqs or not self.running


class InBatches(Silly):
    """a batch at a time: admits nothing while an answer is on its way"""

    def may_admit(self, request, schedule):
        return not any(one.num_output_tokens for one in self.running)


class SillyRouter(Router):
    is_silly = True


class OnlyOne(SillyRouter):
    """all to one replica"""

    def choose(self, request, loads):
        return min(loads)


class AtRandom(SillyRouter):
    """at random"""

    def choose(self, request, loads):
        return Random(request.request_id).choice([*loads])
