"""Routing: which of several replicas serves a request. Imports no torch.

Chapters: 19_replicas.
"""

from nanovllm.routing.router import (
    MOST_REPLICAS,
    LeastLoaded,
    Loads,
    PrefixAffinity,
    RoundRobin,
    Router,
)

__all__ = ["MOST_REPLICAS", "LeastLoaded", "Loads", "PrefixAffinity", "RoundRobin", "Router"]
