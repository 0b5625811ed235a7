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


class InRandomOrder(Silly):
    """in random order"""

    def priority(self, request):
        return Random(request.arrival).random()


class ShortestPrompt(Silly):
    """shortest prompt first"""

    def priority(self, request):
        return len(request.prompt_token_ids), request.arrival


class Constant(Silly):
    """all alike"""

    def priority(self, request):
        return 0


class TinyBudget(Silly):
    """at most 64 tokens per step"""

    def step_budget(self):
        return min(64, self.max_num_batched_tokens), 64


class SmallBudget(TinyBudget):
    """a quarter of the tokens per step"""

    def step_budget(self):
        most = max(1, self.max_num_batched_tokens // 4)
        return most, most


class HalfBudget(Silly):
    """half of the tokens per step"""

    def step_budget(self):
        most = max(1, self.max_num_batched_tokens // 2)
        return most, most


class OnePrompt(Silly):
    """one prompt at a time"""

    def may_admit(self, request, schedule):
        return not any(one.is_prefilling for one in self.running)


class LongestPrompt(Silly):
    """longest prompt first"""

    def priority(self, request):
        return -len(request.prompt_token_ids), request.arrival


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


class ByTheBegin(SillyRouter):
    """by the prompt's first 512 tokens"""

    def choose(self, request, loads):
        begin = tuple(request.prompt_token_ids[:512])
        return [*loads][hash(begin) % len(loads)]


class ByLength(SillyRouter):
    """by the length of the prompt"""

    def choose(self, request, loads):
        return [*loads][len(request.prompt_token_ids) % len(loads)]


class AnotherEachSecond(SillyRouter):
    """all to one replica, each second to another"""

    def choose(self, request, loads):
        return [*loads][int(request.arrival_time) % len(loads)]


class TenInARow(SillyRouter):
    """ten in a row to the same replica"""

    def choose(self, request, loads):
        turn = self.num_turns // 10
        self.num_turns += 1
        return [*loads][turn % len(loads)]


class HalfOfThem(AtRandom):
    """at random, to half of the replicas"""

    def choose(self, request, loads):
        return super().choose(request, [*loads][: max(1, len(loads) // 2)])
