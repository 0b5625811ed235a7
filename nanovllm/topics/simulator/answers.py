"""Answers: the tokens of the jobs, and what drafts of them would bring. Imports no torch."""

from collections.abc import Sequence as Tokens
from typing import Any

from nanovllm.schedule import Schedule
from nanovllm.sequence import Sequence
from nanovllm.topics.decoding.drafts import Proposer, config_of
from nanovllm.topics.simulator.jobs import STOP, Job, Served

WRONG = -1  # a token that no answer has


def token_of(job: Job, i: int) -> int:
    """Output token i of the job's answer."""
    return STOP if i + 1 == job.num_outputs else job.answer


def job_of(served: dict[str, Served], seq: Sequence) -> Job:
    return served[seq.request.request_id].job


def drawn(served: dict[str, Served], schedule: Schedule) -> list[int]:
    """The next token of each row: the jobs know the answers of the simulated model."""
    token_ids = []
    for seq in schedule.sampled:
        job = job_of(served, seq)
        token_ids.append(token_of(job, seq.num_output_tokens))
    return token_ids


class JobProposer(Proposer):
    """Proposes as often, and as rightly, as `Job.right_draft_tokens` says."""

    def __init__(self, fields: dict[str, Any], served: dict[str, Served]):
        super().__init__(config_of(fields))
        has_no_cost = self.config.method == "ngram"
        self.config.require("method", has_no_cost, "'ngram': a simulation has no draft model")
        self.served = served

    def propose(self, seq: Sequence, most: int) -> Tokens[int]:
        job = job_of(self.served, seq)
        begin = seq.num_output_tokens
        num_right = -1
        if begin < len(job.right_draft_tokens):
            num_right = job.right_draft_tokens[begin]
        if num_right < 0:
            return []
        num_right = min(most, num_right)
        right = range(begin, begin + num_right)
        num_wrong = most - len(right)
        return [token_of(job, i) for i in right] + [WRONG] * num_wrong
