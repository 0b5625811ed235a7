"""Draws what tutorials/baselines/replay.py counted, with the paper's numbers beside ours (its
figures 2 and 15).

    python -m tutorials.figures.plot_memory            # reads tutorials/results/memory.json

Writes memory_waste and memory_sharing, .png, next to this script. Needs matplotlib.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt

from tutorials.baselines.replay import PAPER_SAVED, PAPER_TOKEN_STATES

HERE = Path(__file__).resolve().parent
RESULT = HERE.parent / "results" / "memory.json"

PARTS = {
    "token_states": ("tokens", "#0072B2"),
    "reserved": ("reserved for tokens to come", "#56B4E9"),
    "internal_fragmentation": ("internal fragmentation", "#E69F00"),
    "external_fragmentation": ("external fragmentation, free", "#999999"),
}


def plot_waste(results: dict):
    figure, all_axes = plt.subplots(
        1, len(results), figsize=(5 * len(results), 4), layout="constrained", sharey=True
    )
    for axes, (name, result) in zip([all_axes] if len(results) == 1 else all_axes, results.items()):
        systems, bottom = list(result["systems"]), [0.0] * len(result["systems"])
        for part, (label, color) in PARTS.items():
            shares = [100 * result["systems"][system][part] for system in systems]
            bars = axes.bar(systems, shares, bottom=bottom, color=color, label=label)
            axes.bar_label(
                bars, [f"{share:.1f}" if share > 3 else "" for share in shares], label_type="center"
            )
            bottom = [b + share for b, share in zip(bottom, shares)]
        if name == "ShareGPT":
            paper = [100 * PAPER_TOKEN_STATES[system] for system in systems]
            axes.plot(systems, paper, "k_", markersize=40, label="tokens, as the paper measured")
            axes.legend(
                loc="upper left",
                fontsize="small",
                bbox_to_anchor=(0, -0.1),
                ncol=2,
                frameon=False,
                markerscale=0.4,
            )
        setting = "{num_slots:,} slots, {max_model_len:,} for a request".format(**result["setting"])
        axes.set_title(f"{name}: {setting}", fontsize="medium")
    figure.supylabel("% of the KV cache")
    return figure


def plot_sharing(results: dict):
    figure, all_axes = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained", sharey=True)
    for axes, decoding in zip(all_axes, ("samples", "beams")):
        for (name, result), color in zip(results.items(), ("tab:blue", "tab:purple")):
            widths = sorted(result[decoding], key=int)
            saved = [100 * result[decoding][width]["saved"] for width in widths]
            axes.plot(widths, saved, "o-", color=color, label=f"{name}, replayed")
            paper = [100 * share for share in PAPER_SAVED[name, decoding]]
            axes.plot(
                [widths[0], widths[-1]],
                paper,
                "_",
                color=color,
                markersize=20,
                label=f"{name}, paper",
            )
        axes.set_title(f"{decoding} of a prompt", fontsize="medium")
        axes.set_xlabel("sequences per request")
        axes.set_ylim(0, 90)
    all_axes[0].legend(fontsize="small", markerscale=0.7)
    all_axes[0].set_ylabel("% of blocks saved by sharing")
    return figure


def main() -> None:
    results = json.loads(RESULT.read_text())
    for name, figure in {
        "memory_waste": plot_waste(results["waste"]),
        "memory_sharing": plot_sharing(results["sharing"]),
    }.items():
        figure.savefig(HERE / f"{name}.png", dpi=120)
        print(HERE / f"{name}.png")


if __name__ == "__main__":
    main()
