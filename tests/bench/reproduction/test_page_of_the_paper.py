"""The page and docs/reproduction.md are what the repository's results make; the paper's numbers are its own."""

import json
import os
import re
import tomllib
from pathlib import Path

import pytest

from fedup.bench.methods import method_class
from fedup.bench.reproduction.page import write_page
from fedup.bench.reproduction.tables import load_tables
from fedup.bench.summary import paper_numbers
from fedup.filters.presets import preset
from fedup.request import Forget

ROOT = Path(__file__).parents[3]
PAPER = ROOT / "benchmarks" / "experiments" / "paper"
SOURCE = os.environ.get("FEDUP_PAPER_SOURCE", "")
ORDER = [
    "Figure 1a",
    "Figure 1b",
    "Table 1",
    "Table 3",
    "Figure 4",
    "Table 4",
    "Figure 5",
    *(f"Table {i}" for i in range(5, 9)),
]


@pytest.fixture(scope="module")
def tables():
    return load_tables(PAPER)


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """The page from the results in the repository, and the document beside it."""
    place = tmp_path_factory.mktemp("repository")
    (place / "benchmarks").mkdir()
    for path in (ROOT / "benchmarks").iterdir():
        if path.name != "pages":
            (place / "benchmarks" / path.name).symlink_to(path)
    (place / "docs").mkdir()
    (place / "docs" / "reproduction.md").write_text((ROOT / "docs" / "reproduction.md").read_text())
    write_page(place / "benchmarks")
    text = (place / "benchmarks" / "pages" / "reproduction.html").read_text()
    return text, (place / "docs" / "reproduction.md").read_text()


def section(page: str, name: str) -> str:
    return page.partition(f'<section id="{name}">')[2].partition("</section>")[0]


def test_the_document_in_the_repository_is_what_its_results_make(page):
    assert page[1] == (ROOT / "docs" / "reproduction.md").read_text()


def test_all_tables_and_figures_of_the_paper_are_there_in_its_order_and_the_page_loads_nothing(page):
    assert re.findall(r"<h2>([^.<]+)\. ", page[0])[: len(ORDER)] == ORDER
    assert not re.search(r"(src|href)=\"(?!#)|@import|url\((?!#)", page[0])


def test_cells_show_our_mean_the_seeds_and_the_papers_figure(page):
    newest = {}  # by seed: the paper's own results come before those of other experiments
    for folder in ("baselines", "paper"):
        for path in (ROOT / "benchmarks/results" / folder / "mnist-lenet5/client").glob(
            "federaser-seed?-????????.json"
        ):
            result = json.loads(path.read_text())
            newest[result["seed"]] = result["metrics"]["r_a"]
    shown = f"{sum(newest.values()) / len(newest):.3f}<small>±"
    row = section(page[0], "main_results").partition("mnist-lenet5, client")[2].partition(">F-A<")[0]
    assert re.search(rf">{shown} 0\.\d{{3}}, n = {len(newest)}</small><small class=\"printed\">paper 0\.97<", row)
    assert "72.9 × the paper" in section(page[0], "privacy_budget")
    assert "fedup bench paper --force --only noise --only ag_news-tinybert --only client" in section(page[0], "noise")


def test_every_figure_that_the_paper_prints_stands_in_one_of_its_tables_and_columns_are_those_of_experiments(tables):
    def leaves(table, path=()):
        for key, value in table.items():
            yield from leaves(value, (*path, key)) if isinstance(value, dict) else [(*path, key)]

    shown = set()
    for table in tables:
        own = {method: table.about.printed.get(method, method) for method in table.about.columns}
        for federation, scenario in (place for part in table.parts for place in part.places()):
            for method, name in own.items():
                for key in table.about.shows:
                    if table.printed(federation, scenario, method, key) is not None:
                        metric = table.about.printed_as.get(key, key)
                        shown |= {(federation, scenario, name, metric), (table.about.label, federation, name, metric)}
    assert [path for path in leaves(paper_numbers()) if path not in shown] == []


@pytest.mark.skipif(not SOURCE, reason="FEDUP_PAPER_SOURCE names no copy of the paper's source")
def test_the_papers_numbers_are_those_of_its_source():
    source = Path(SOURCE).read_text()
    bodies = {
        label: _rows(source, label) for label in re.findall(r"\\label\{([^}]+)\}", source) if _rows(source, label)
    }
    pairs = ["mnist-lenet5", "cifar10-resnet18", "cifar10-vit", "ag_news-tinybert", "cifar100-resnet34"]
    numbers = paper_numbers()
    for label, keys in (("tab:adapter_dim", ("r_a", "storage_bytes")), ("tab:alpha", ("r_a", "f_a"))):
        for pair, row in zip(pairs, bodies[label], strict=True):
            factors = {"storage_bytes": 1024}
            found = [value[key] / factors.get(key, 1) for value in numbers[label][pair].values() for key in keys]
            assert found == row, (label, pair)
    for pair, row in zip(pairs, bodies["tab:ablation_class_centroid"], strict=True):
        own = numbers["tab:ablation_class_centroid"][pair]
        assert [own[column][key] for key in ("r_a", "f_a") for column in ("features", "centroids")] == row
    for key, row in zip(("r_a", "f_a", "mia_learned"), bodies["dp"], strict=True):
        own = [
            v
            for p in (pairs[1], pairs[3])
            for v in (numbers[p]["client"]["paper-0.001"][key], numbers["dp"][p]["fedup"][key])
        ]
        assert own == row
    for pair, row in zip([pairs[0], pairs[1], pairs[3], pairs[4]], bodies["tab:privacy budget"], strict=True):
        budgets = [one for one in numbers[pair]["class"].values() if "paper_epsilon" in one]
        assert [one["paper_epsilon"] for one in budgets] == row
    for method, row in zip(
        ("eraseclient", "federaser", "exact_fun", "fused", "retrain", "fedup"),
        bodies["tab:Unlearning Cost"],
        strict=True,
    ):
        own = [numbers[pair]["client"][method] for pair in (pairs[1], pairs[3])]
        assert [v for one in own for v in (one["time_to_effect"], one["bytes_all"] / 1e6)] == row
    _check_main(numbers, pairs, bodies["tab:results"])


def _check_main(numbers, pairs, rows):
    columns = [("client", m) for m in ("eraseclient", "federaser", "exact_fun", "fused", "retrain", "fedup")]
    columns += [(kind, m) for kind in ("class", "sample") for m in ("fused", "retrain", "fedup")]
    for i, row in enumerate(rows):
        keys = {"sample": ("zero_a", "ps", "mia_learned")}
        line = [
            numbers[pairs[i // 3]][kind][method][keys.get(kind, ("r_a", "f_a", "mia_learned"))[i % 3]]
            for kind, method in columns
        ]
        assert line == row, (pairs[i // 3], i % 3)


def _rows(source: str, label: str) -> list[list[float]]:
    """The lines of numbers of the table with that label."""
    before = source.partition(f"\\label{{{label}}}")[0]
    body = (
        before[before.rfind("\\begin{tabular") :] if "\\end{tabular" in before[before.rfind("\\begin{table") :] else ""
    )
    plain = re.sub(r"\\(textbf|textit|rowcolor|multirow|multicolumn)(\[[^]]*\])?", "", body)
    rows = []
    for line in plain.split("\\\\"):
        cells = [re.sub(r"[{}\s]", "", cell) for cell in line.split("&")]
        values = [float(cell) for cell in cells if re.fullmatch(r"\d+\.?\d*", cell)]
        if len(values) > 2 and "hspace" not in line and "diagbox" not in line:
            rows.append(values)
    return rows


def test_features_and_centroids_differ_in_the_ratio_alone_and_sweeps_in_what_they_are_named_after():
    def settings(name):
        table = tomllib.loads((PAPER / f"{name}.toml").read_text())["methods"]
        return {m: method_class(v.pop("use", m))(**v) for m, v in table.items() if m not in ("retrain", "none")}

    features, centroids = settings("features")["features"], preset("paper", Forget.clients([1]))
    assert features.config(0) == centroids.config and (features.ratio, centroids.ratio) == (1.0, 0.8)
    assert (features.sigma, features.cache) == (centroids.sigma, centroids.cache)
    assert {name: one.rank for name, one in settings("rank").items()} == {f"rank{r}": r for r in (4, 8, 16, 32, 64)}
    assert {name: f"alpha{one.alpha:g}" for name, one in settings("alpha").items()} == {n: n for n in settings("alpha")}
    losses = settings("figure_5")
    assert {(one.alpha, one.steps) for one in losses.values()} == {
        (a, s) for a in (0, 0.5, 1) for s in (10, 30, 100, 300)
    }
