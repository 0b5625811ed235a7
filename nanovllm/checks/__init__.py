"""Checks: what a scheduler of one's own may get wrong, and whether all blocks are accounted for."""
