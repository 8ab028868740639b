"""reward.png: how the reward moved over the steps."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path

import msgspec

from segue.wire.frame import JSON

INSTALL_HINT = "no reward.png: matplotlib is not installed; pip install 'segue[plot]' adds it"
_TRAIN, _HELD_OUT, _BASELINE = "#2a6fbb", "#c4501b", "#666666"


def plot_rewards(summary: Mapping[str, JSON], path: Path) -> str:
    """Draw a summary's rewards to `path`. Returns one sentence for people: what was written, or what is missing."""
    train, held_out = _pairs(summary, "reward_train_by_step"), _pairs(summary, "reward_eval")
    if not train and not held_out:
        return f"no {path.name}: no step has finished"
    if importlib.util.find_spec("matplotlib") is None:
        return INSTALL_HINT
    # The object interface: pyplot would keep global state and look for a display.
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(8, 4.5), dpi=144, facecolor="white", layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot(facecolor="white")
    if train:
        axes.plot(*zip(*train, strict=True), color=_TRAIN, linewidth=1.8, label="training, mean of a step")
    if held_out:
        axes.plot(*zip(*held_out, strict=True), "o-", color=_HELD_OUT, linewidth=1.4, label="held-out tasks")
    baselines = summary.get("baselines")
    for name, value in baselines.items() if isinstance(baselines, Mapping) else ():
        axes.axhline(float(str(value)), color=_BASELINE, linestyle="--", linewidth=1.2, label=name.replace("_", " "))
    axes.set(xlabel="step", ylabel="reward", title=str(summary.get("run_id", "")))
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.margins(x=0.02)
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="best")
    figure.savefig(path)
    return f"wrote {path}"


def _pairs(summary: Mapping[str, JSON], key: str) -> list[tuple[float, float]]:
    return msgspec.convert(summary.get(key), list[tuple[float, float]])
