"""Your answers to the exercises of chapter 19. To check them: python -m tutorials.check 19"""

import hashlib

from nanovllm import PrefixAffinity, Router


# --- 19.1 ---
class Weighted(Router):
    """A replica that is twice as fast may have twice as many requests, this one included. Of equal
    ones, the faster one."""

    # how many times as fast each replica is as the slowest one
    speeds: dict[int, float] = {0: 2.0, 1: 1.0}  # noqa: RUF012

    def choose(self, request, loads):
        """`loads`: for each replica, how many requests it has not finished."""
        raise NotImplementedError


# --- 19.2 ---
class Noting(PrefixAffinity):
    """Notes in `expected`, by request id, how many tokens it expects in the cache of the replica that
    it chooses, before the prompt is sent there."""

    def __init__(self, block_size, num_blocks):
        super().__init__(block_size, num_blocks)
        self.expected: dict[str, int] = {}

    def choose(self, request, loads):
        raise NotImplementedError


# --- 19.3 ---
class Steady(Router):
    """Sends a user (`request.params.extra_args["user"]`, a number or a text) always to the same
    replica, and remembers nothing. If a replica goes, only its users move; if one comes, users move
    to it only."""

    def choose(self, request, loads):
        raise NotImplementedError
