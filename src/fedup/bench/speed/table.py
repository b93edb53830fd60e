"""Speed for people: the same lines in the terminal and in Markdown."""

from typing import Any

from fedup.bench.speed import PARTS
from fedup.bench.tables import markdown_table
from fedup.tasks.machine import show_commit

HEAD = ("measured", "value", "goal", "met")
SHARED = (
    "shared: there is no record that this machine was idle while it was measured, so no goal is judged, and the values "
    "are indications only."
)


def title(result: dict[str, Any]) -> str:
    """What was measured on what."""
    machine = result["machine"]
    place = machine["accelerator"] if result["device"] == "cuda" else machine["processor"]
    threads = "" if result["device"] == "cuda" else f", {machine['threads']} threads"
    return f"{place}{threads}, torch {machine['torch']}"


def is_shared(result: dict[str, Any]) -> bool:
    """Whether others may have used the device meanwhile; so it is where nobody looked."""
    return result.get("alone") is not True


def cells(row: dict[str, Any], *, shared: bool) -> tuple[str, str, str, str]:
    """Name, value, goal and whether it is met; goals are judged on an idle device alone."""
    value = f"{row['value']:.3g} {row['unit']}"
    if row["goal"] is None:
        return row["name"], value, "", ""
    met = "shared" if shared else "yes" if row["met"] else "no"
    return row["name"], value, f"{'≤' if row['at_most'] else '≥'} {row['goal']:g}", met


def speed_table(result: dict[str, Any]) -> str:
    """One machine's speed in Markdown, with what it was computed from."""
    shared = is_shared(result)
    sentences = [SHARED, *notes(result)] if shared else notes(result)
    return "\n\n".join(
        [
            f"## {title(result)}: {', '.join(_parts(result))}",
            f"`{_command(result)}`, commit {show_commit(result['code'])}.",
            markdown_table(HEAD, [cells(row, shared=shared) for row in result["table"]]),
            "\n".join(f"- {sentence}" for sentence in sentences),
        ]
    )


def _parts(result: dict[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["part"] for row in result["table"]))


def _command(result: dict[str, Any]) -> str:
    """What gives these rows again."""
    parts = _parts(result)
    only = "" if set(parts) == set(PARTS) else "".join(f" --only {part}" for part in parts)
    literal = " --literal" if any("literal" in row["name"] for row in result["table"]) else ""
    return f"fedup bench speed --device {result['device']}{only}{literal}"


def notes(result: dict[str, Any]) -> list[str]:
    """Sentences below the table: what rows were computed from."""
    return [sentence for row in result["table"] for sentence in _notes_of(row)]


def _notes_of(row: dict[str, Any]) -> list[str]:
    detail, model = row["detail"], row["name"].split(":")[0]
    if row["part"] == "training" and "against the eager loop" in row["name"]:
        return [
            f"{model}: {detail['rows']:,} rows, {detail['clients']} clients, batches of {detail['batch']}, precision "
            f"{detail['precision']}: a round {_ms(detail['round_s'])}, the eager loop {_ms(detail['eager_s'])}, an "
            f"epoch in one place {_ms(detail['centralised_s'])}, a plain loop over the same batches "
            f"{_ms(detail['loop_s'])}; engine: {detail['engine']}."
        ]
    if row["part"] == "growth":
        each = ", ".join(f"{n} clients {value:.3g} µs" for n, value in detail["microseconds_per_row"].items())
        return [f"{model}, {detail['rows']:,} rows, time for each: {each}."]
    if row["part"] == "limits":
        return [_limit(model, detail)]
    if row["part"] == "precision":
        runs = (
            f"{name}: accuracy {', '.join(format(run['accuracy'], '.3f') for run in detail[name])} in "
            f"{', '.join(format(run['time_s'], '.1f') for run in detail[name])} s"
            for name in ("float32", "bfloat16")
        )
        about = f"{detail['rows']:,} rows, {detail['rounds']} rounds, seeds {', '.join(map(str, detail['seeds']))}"
        return [f"{detail['model']} on {detail['data']}, {about}: {'; '.join(runs)}."]
    if "moments_bytes" in detail:
        sizes = [detail[f"{sent}_bytes"] / 1e6 for sent in ("moments", "centroids")]
        return [f"Of {detail['rows']:,} rows: moments {sizes[0]:.3g} MB, centroids {sizes[1]:.3g} MB."]
    if "request_s" in detail:
        each = ", ".join(f"{n} clients {_ms(seconds)}" for n, seconds in detail["request_s"].items())
        return [f"Client request from moments of {detail['width']} features: {each}."]
    if "fit_s" in detail and "likewise" in row["name"]:
        return [
            f"The literal recipe: {detail['clustering_s']:.1f} s of clustering and {detail['fit_s']:.1f} s of fitting, "
            f"R-A {detail['retain']:.4f}, F-A {detail['forget']:.4f}."
        ]
    if row["name"] == "class request":
        return [f"Class request: R-A {detail['retain']:.4f}, F-A {detail['forget']:.4f}."]
    return []


def _limit(model: str, detail: dict[str, Any]) -> str:
    text = (
        f"{model}: a step of {detail['batch']} rows takes {_ms(detail['step_s'])}; its {detail['flops'] / 1e9:.3g} "
        f"GFLOP are {_ms(detail['floor_s'])} at full speed"
    )
    if "kernels_per_step" in detail:
        parts = ", ".join(f"{kind} {us:.0f} µs" for kind, us in detail["kernel_microseconds_per_step"].items())
        text += f"; {detail['kernels_per_step']:.0f} kernels a step, by time before overlap: {parts}"
    return text + "."


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.3g} ms" if seconds < 0.9995 else f"{seconds:.3g} s"
