"""Figures as people read them."""

from fedup.bench.metrics import Column
from fedup.bench.summary import Figure


def show_value(value: float, column: Column) -> str:
    """One value in the style of its column."""
    match column.style:
        case "share":
            return f"{value:.3f}"
        case "points":
            return f"{100 * value:+.2f}".replace("-", "−")
        case "seconds":
            return _seconds(value)
        case "bytes":
            return show_bytes(value)
        case "count":
            return f"{value:,.0f}"
        case "number":
            return f"{value:.3f}".replace("-", "−")
        case "yes":
            return "yes" if value == 1 else "NO"
        case _:
            return f"{value:.2f}"


def show_figure(figure: Figure | None, column: Column) -> str:
    """Mean ± deviation over seeds; a dash where there is none."""
    if figure is None:
        return "–"
    if column.style == "yes":
        return f"{'yes' if figure.mean == 1 else 'NO'} ({sum(figure.values.values()):.0f}/{figure.n})"
    text = show_value(figure.mean, column)
    if figure.std is None or column.style in ("bytes", "count"):
        return text
    if column.style == "seconds":
        return _seconds(figure.mean, figure.std)
    spread = {"share": f"{figure.std:.3f}", "number": f"{figure.std:.3f}", "points": f"{100 * figure.std:.2f}"}.get(
        column.style, f"{figure.std:.2f}"
    )
    return f"{text} ± {spread}"


def _seconds(value: float, spread: float | None = None) -> str:
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
