"""Figures as SVG text, to be put into a page as they are."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

if TYPE_CHECKING:
    from fedup.bench.summary import Figure as Summed

_CLASS_COLORS = (
    *("#5b8ff9", "#61c9a8", "#8d7fd1", "#c9b458", "#6dc8ec"),
    *("#9270ca", "#7aa874", "#b39b8e", "#6f8fa6", "#a7b86a"),
)
COLORS = {"original": "#9aa4b2", "forgotten": "#e4572e", "restored": "#2e86ab", "retrained": "#4c9f70"}


def _figure(width: float, height: float, columns: int = 1, rows: int = 1, **shared: Any) -> tuple[Figure, list[Axes]]:
    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, list(figure.subplots(rows, columns, squeeze=False, **shared).flat)


def _svg(figure: Figure) -> str:
    from matplotlib import rc_context

    text = io.StringIO()
    with rc_context({"svg.hashsalt": "fedup", "svg.fonttype": "none"}):  # same data, same text; real letters
        figure.savefig(text, format="svg", metadata={"Date": None})
    return text.getvalue()[text.getvalue().index("<svg") :]


def _plain(axes: Axes, grid: Literal["x", "y", "both"] | None = None) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_axisbelow(True)
    if grid:
        axes.grid(axis=grid, alpha=0.3)


def _as_columns(axes: Axes, names: Sequence[str], entries: int) -> None:
    """Shares as bars that stand, with a legend above them."""
    axes.set_xticks(range(len(names)), names)
    axes.set_ylim(0, 1.05)
    axes.legend(ncols=entries, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    _plain(axes, "y")


def _as_lines(axes: Axes, names: Sequence[str], most: float) -> None:
    """Seconds as bars that lie, on a logarithmic axis."""
    axes.set_xscale("log")
    axes.set_xlim(right=most)
    axes.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0), numticks=9))
    axes.xaxis.set_major_formatter("{x:g} s")
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    _plain(axes, "x")


def bars_per_class(accuracies: Mapping[str, Sequence[float]], class_names: Sequence[str]) -> str:
    """Recall of each class, one bar per state of the model."""
    figure, (axes,) = _figure(9.6, 3.2)
    width = 0.8 / len(accuracies)
    for i, (state, values) in enumerate(accuracies.items()):
        places = [label + (i - (len(accuracies) - 1) / 2) * width for label in range(len(class_names))]
        axes.bar(places, values, width, label=state, color=COLORS[state])
    axes.set_xlabel("class (official test set)")
    axes.set_ylabel("accuracy")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    _as_columns(axes, class_names, len(accuracies))
    return _svg(figure)


def bars_of_time(seconds: Mapping[str, tuple[float, float]]) -> str:
    """Time to forget beside time to retrain, on a logarithmic axis: `{request: (forget, retrain)}`."""
    figure, (axes,) = _figure(9.6, 0.7 + 0.75 * len(seconds))
    for row, (forget, retrain) in enumerate(seconds.values()):
        for offset, value, state in ((-0.2, forget, "forgotten"), (0.2, retrain, "retrained")):
            axes.barh(row + offset, value, 0.36, color=COLORS[state])
            axes.text(value * 1.05, row + offset, f"{value:.2f} s" if value < 10 else f"{value:.0f} s", va="center")
    axes.set_xlabel("filter in orange, retraining in green")
    _as_lines(axes, list(seconds), max(map(max, seconds.values())) * 2.5)
    return _svg(figure)


def features_before_and_after(points: Mapping[str, Any], class_names: Sequence[str], what: str) -> str:
    """Features on two principal axes, before and after the filter; what is to be forgotten in orange."""
    figure, both = _figure(9.6, 4.2, 2, sharex=True, sharey=True)
    forgotten = np.array(points["forgotten"], dtype=bool)
    labels = np.array(points["labels"])[~forgotten]
    colors = [_CLASS_COLORS[label % len(_CLASS_COLORS)] for label in labels]
    for axes, state in zip(both, ("before", "after"), strict=True):
        kept, named = np.array(points[state])[~forgotten], np.array(points[state])[forgotten]
        axes.scatter(kept[:, 0], kept[:, 1], s=9, c=colors, alpha=0.45, linewidths=0)
        axes.scatter(named[:, 0], named[:, 1], s=16, c=COLORS["forgotten"], label=what, linewidths=0)
        for label in np.unique(labels):
            x, y = kept[labels == label].mean(0)
            axes.text(x, y, class_names[label], ha="center", va="center", fontweight="bold")
        axes.set_title(f"{state} the filter", fontsize=10)
        axes.set(xticks=[], yticks=[])
        _plain(axes)
    both[0].legend(loc="best", frameon=False)
    return _svg(figure)


def images_under_attack(attack: Mapping[str, Any], class_names: Sequence[str]) -> str:
    """Images with a trigger; below each, what the model says before and after."""
    figure, axes = _figure(9.6, 1.9, len(attack["images"]))
    before, after = attack["answers"]["original"], attack["answers"]["forgotten"]
    for axis, image, true, wrong, right in zip(axes, attack["images"], attack["true"], before, after, strict=True):
        axis.imshow(image, cmap="gray_r", interpolation="nearest")
        axis.set(xticks=[], yticks=[])
        axis.set_xlabel(f"before: {class_names[wrong]}", color=COLORS["original"])
        color = COLORS["retrained" if right == true else "forgotten"]
        axis.set_title(f"after: {class_names[right]}", color=color, fontsize=10)
    return _svg(figure)


def methods_against_retrain(sides: Mapping[str, Mapping[str, "Summed"]], reference: str) -> str:
    """A panel for each figure, a line for each method with its deviation; Retrain's value goes through all of them."""
    names = list(dict.fromkeys(name for side in sides.values() for name in side))
    figure, panels = _figure(9.6, 1.0 + 0.33 * len(names), len(sides), sharey=True)
    for axes, (title, side) in zip(panels, sides.items(), strict=True):
        if reference in side:
            axes.axvline(side[reference].mean, color=COLORS["retrained"], alpha=0.5, lw=1.2)
        for row, name in enumerate(names):
            if name in side:
                color = {reference: COLORS["retrained"], "fedup": COLORS["forgotten"]}.get(name, "#5d6b7a")
                one = side[name]
                axes.errorbar(one.mean, row, xerr=one.std or 0, fmt="o", ms=7, color=color, capsize=3, elinewidth=1.2)
        axes.set_xlim(-0.03, 1.03)
        axes.xaxis.set_major_formatter(PercentFormatter(1))
        axes.set_title(title, fontsize=10)
        _plain(axes, "x")
    panels[0].set_yticks(range(len(names)), names)
    panels[0].invert_yaxis()
    return _svg(figure)


def accuracy_under_attack(pairs: Mapping[str, Mapping[str, tuple[float, float]]]) -> str:
    """Accuracy on triggered test rows as bars and on clean ones as lines: `{pair: {method: (triggered, clean)}}`.

    Methods that every pair has.
    """
    methods = [method for method in next(iter(pairs.values())) if all(method in found for found in pairs.values())]
    shades = ["#4c9f70", "#9aa4b2", "#e4572e", "#f2a65a", "#c9d1dc", "#2e86ab", "#7d5ba6", "#b08968"]
    figure, (axes,) = _figure(9.6, 3.4)
    width = 0.8 / max(len(methods), 1)
    for i, method in enumerate(methods):
        triggered, clean = zip(*(found[method] for found in pairs.values()), strict=True)
        left = [at + (i - len(methods) / 2) * width for at in range(len(pairs))]
        right = [place + width for place in left]
        axes.bar(left, triggered, width * 0.94, label=method, color=shades[i % len(shades)], align="edge")
        axes.hlines(clean, left, right, color="#333")
    axes.set_ylabel("accuracy, triggered (line: clean)")
    _as_columns(axes, list(pairs), 6)
    return _svg(figure)


@dataclass(frozen=True)
class Curve:
    """Accuracy by ε, and what it is compared with."""

    points: Sequence[tuple[float, float, float]]  # ε, mean, deviation
    lines: Mapping[str, float]  # heights by what they are of


_LEAST_SPAN = 0.05


def accuracy_against_epsilon(curves: Mapping[str, Curve]) -> str:
    """Retained accuracy by the ε of the guarantee, a panel for each federation and scenario."""
    columns = min(3, len(curves))
    rows = -(-len(curves) // columns)
    figure, panels = _figure(9.6, 2.9 * rows, columns, rows)
    colors = {"no noise": COLORS["forgotten"], "original": COLORS["original"], "retrained": COLORS["retrained"]}
    for axes, (title, curve) in zip(panels, curves.items(), strict=False):
        epsilons, means, deviations = zip(*curve.points, strict=True)
        for label, height in curve.lines.items():
            axes.axhline(height, color=colors[label], label=label, linewidth=1.4)
        axes.errorbar(epsilons, means, deviations, marker="o", color=COLORS["restored"], label="under DP", capsize=3)
        axes.set_xscale("log", base=2)
        axes.set_xticks(epsilons, [f"{epsilon:g}" for epsilon in epsilons])
        low, high = axes.get_ylim()
        room = max(0.0, _LEAST_SPAN - (high - low)) / 2  # a hair's breadth should not fill a panel
        axes.set_ylim(low - room, high + room)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("ε (δ = 1e-5)")
        _plain(axes, "both")
    for axes in panels[len(curves) :]:
        axes.set_visible(False)
    panels[0].set_ylabel("R-A")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="outside upper center", frameon=False)
    return _svg(figure)


def times_of_methods(seconds: Mapping[str, float]) -> str:
    """Seconds by method, on a logarithmic axis."""
    figure, (axes,) = _figure(9.6, 0.8 + 0.36 * len(seconds))
    for row, (name, value) in enumerate(seconds.items()):
        axes.barh(row, value, 0.62, color=COLORS["forgotten"] if name == "fedup" else COLORS["original"])
        axes.text(value * 1.08, row, f"{value:.3g} s", va="center")
    _as_lines(axes, list(seconds), max(seconds.values()) * 4)
    return _svg(figure)


_SHADES = ["#8d7fd1", "#c9b458", "#6dc8ec", "#b39b8e", "#6f8fa6", "#a7b86a"]


def _shades(methods: Sequence[str]) -> dict[str, str]:
    """A colour for each method: Retrain green, FedUP in orange, whatever else is there."""
    ours = dict(zip([name for name in methods if name.startswith("FedUP")], ("#e4572e", "#f2a65a"), strict=False))
    fixed = {"Retrain": COLORS["retrained"], **ours}
    others = [name for name in methods if name not in fixed]
    return {**{name: _SHADES[i % len(_SHADES)] for i, name in enumerate(others)}, **fixed}


def retained_before_and_after(panels: Mapping[str, Mapping[str, Mapping[str, float]]], before: str) -> str:
    """R-A after the request as bars, that of `before` as a line across them: `{panel: {pair: {method: R-A}}}`."""
    figure, all_axes = _figure(9.6, 0.6 + 2.7 * len(panels), 1, len(panels))
    methods = list(dict.fromkeys(name for pairs in panels.values() for found in pairs.values() for name in found))
    after = [name for name in methods if name != before]
    width, shades = 0.8 / max(len(after), 1), _shades(after)
    for axes, (title, pairs) in zip(all_axes, panels.items(), strict=True):
        for i, method in enumerate(after):
            places = [(at, found[method]) for at, found in enumerate(pairs.values()) if method in found]
            left = [at + (i - len(after) / 2) * width for at, _ in places]
            heights, color = [height for _, height in places], shades[method]
            axes.bar(left, heights, width * 0.94, label=method, color=color, align="edge")
        for at, found in enumerate(pairs.values()):
            if before in found:
                axes.hlines(found[before], at - 0.42, at + 0.42, color="#333", lw=1.2)
        axes.set_title(title, fontsize=10, loc="left", pad=26 if axes is all_axes[0] else 6)
        axes.set_ylabel(f"R-A (line: {before})")
        axes.set_xticks(range(len(pairs)), list(pairs))
        axes.set_ylim(0, 1.05)
        _plain(axes, "y")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=min(len(after), 4), loc="outside upper center", frameon=False)
    return _svg(figure)


def times_by_pair(seconds: Mapping[str, Mapping[str, float]]) -> str:
    """Seconds of some methods for each pair, on a logarithmic axis: `{pair: {method: seconds}}`."""
    lines = [(pair, method, value) for pair, found in seconds.items() for method, value in found.items()]
    shades = _shades(list(dict.fromkeys(method for _, method, _ in lines)))
    figure, (axes,) = _figure(9.6, 0.8 + 0.34 * len(lines))
    for row, (_, method, value) in enumerate(lines):
        axes.barh(row, value, 0.62, color=shades[method])
        axes.text(value * 1.08, row, f"{value:.3g} s", va="center")
    _as_lines(axes, [f"{pair}, {method}" for pair, method, _ in lines], max(value for *_, value in lines) * 4)
    return _svg(figure)


def accuracy_by_steps(panels: Mapping[str, Mapping[str, Sequence[tuple[int, float]]]]) -> str:
    """R-A after so many steps of the fit, a panel for each pair and a line for each loss: `{pair: {loss: points}}`."""
    columns = min(3, len(panels))
    figure, all_axes = _figure(9.6, 2.7 * -(-len(panels) // columns), columns, -(-len(panels) // columns))
    for axes, (title, curves) in zip(all_axes, panels.items(), strict=False):
        for i, (name, points) in enumerate(curves.items()):
            steps, heights = zip(*points, strict=True)
            axes.plot(steps, heights, marker="o", ms=4, label=name, color=("#e4572e", "#8d7fd1", "#6dc8ec")[i % 3])
        axes.set_xscale("log")
        axes.set_xticks(steps, [str(step) for step in steps])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("steps")
        _plain(axes, "both")
    for axes in all_axes[len(panels) :]:
        axes.set_visible(False)
    all_axes[0].set_ylabel("R-A")
    handles, labels = all_axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, ncols=len(labels), loc="outside upper center", frameon=False)
    return _svg(figure)
