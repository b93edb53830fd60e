"""Figures as people read them: the one place for it in the benchmark."""

from fedup.bench.metrics import Column
from fedup.bench.summary import Figure


def show_value(value: float, column: Column, spread: float | None = None) -> str:
    """One value in the style of its column, and its deviation where there is one."""
    digits = 3 if column.style in ("share", "number") else 2
    match column.style:
        case "seconds":
            return show_seconds(value, spread)
        case "bytes":
            return show_bytes(value)
        case "count":
            return f"{value:,.0f}"
        case "yes":
            return "yes" if value == 1 else "NO"
        case "points":
            text, beside = f"{100 * value:+.2f}".replace("-", "−"), 100 * (spread or 0.0)
        case _:
            text, beside = f"{value:.{digits}f}", spread or 0.0
    if column.style == "number":
        text = text.replace("-", "−")
    return text if spread is None else f"{text} ± {beside:.{digits}f}"


def show_figure(figure: Figure | None, column: Column) -> str:
    """Mean ± deviation over seeds; a dash where there is none."""
    if figure is None:
        return "–"
    text = show_value(figure.mean, column, figure.std)
    return f"{text} ({sum(figure.values.values()):.0f}/{figure.n})" if column.style == "yes" else text


def show_seconds(value: float, spread: float | None = None) -> str:
    """Seconds, or thousandths where there is less than a tenth of one; the spread in the same unit."""
    unit, factor = ("ms", 1000) if 0 < value < 0.1 else ("s", 1)
    digits = 0 if value == 0 or value >= 100 else 1 if value >= 10 or unit == "ms" else 2
    numbers = [f"{factor * one:.{digits}f}" for one in (value, spread) if one is not None]
    return f"{' ± '.join(numbers if value else numbers[:1])} {unit}"


def show_bytes(size: float) -> str:
    """A size in the largest unit that it fills."""
    for unit, factor in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size >= factor:
            return f"{size / factor:.1f} {unit}"
    return f"{size:.0f} B"


def show_count(count: int, noun: str) -> str:
    """A number of things: 1 seed, 2 seeds."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
