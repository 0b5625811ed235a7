"""Draws simulated runs: one run by steps and by time, and one small workload under several policies.

    python -m tutorials.figures.plot_policies

Writes policies_clock.png (chapter 12) and policies.png (chapter 13) next to this script. Needs matplotlib, no torch.
"""

import argparse
from pathlib import Path

from matplotlib.figure import Figure

from nanovllm.config import Config
from nanovllm.simulator import Job, simulate
from tutorials.simulation.plots import gantt

HERE = Path(__file__).resolve().parent


def draw_clock() -> None:
    """Four answers and a prompt of 4,000 tokens, by steps and by seconds."""
    jobs = [Job(0.0, ((i, 100),), num_outputs=12 + 2 * i, answer=10) for i in range(1, 5)]
    jobs.append(Job(0.02, ((5, 4000),), num_outputs=6, answer=10))
    run = simulate(jobs, Config(model="qwen3-8b", max_num_batched_tokens=4096), keep_steps=True)
    figure = Figure(figsize=(8, 4.6), layout="constrained")
    for axes, by in zip(figure.subplots(2, 1), ("steps", "seconds")):
        gantt(run, axes, by=by)
    figure.savefig(HERE / "policies_clock.png", dpi=120)


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    draw_clock()


if __name__ == "__main__":
    main()
