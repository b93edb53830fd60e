"""The report of an experiment, from result files whose content is known."""

import base64
import csv
import hashlib
import json
import re
import shutil
import subprocess

import pytest
from tests.bench._made_up import MACHINE, TOML, MadeUp

from fedup.bench.experiment_report import write_report
from fedup.bench.format import show_bytes, show_figure, show_value
from fedup.bench.metrics import columns
from fedup.bench.result_tables import write_tables
from fedup.bench.results import Results
from fedup.bench.summary import Figure, summarize

COLUMNS = {column.key: column for column in columns()}


@pytest.fixture
def report(tmp_path):
    made_up = MadeUp(tmp_path)
    made_up.put(
        "client",
        "retrain",
        {seed: {"r_a": 0.9, "f_a": 0.01, "time": 100.0, "test": 0.9, "gap_r_a": 0.0} for seed in range(3)},
    )
    made_up.put(
        "client", "none", {seed: {"r_a": 0.5 + 0.1 * seed, "f_a": 0.6, "time": 0.0, "test": 0.5} for seed in range(3)}
    )
    made_up.put(
        "client", "fedup", {seed: {"r_a": 0.89, "f_a": 0.02, "time": 0.5, "time_to_effect": 0.5} for seed in range(2)}
    )
    made_up.put(
        "client", "fedup", {2: {"failed": {"error": "RuntimeError", "message": "no <b>memory</b>", "where": ""}}}
    )
    made_up.put("client", "logit_mask", {seed: {"not_supported": True} for seed in range(3)})
    blocks = summarize(made_up.experiment, made_up.results)
    markdown, table, page = write_report(made_up.experiment, blocks, tables=tmp_path, pages=tmp_path / "pages")
    return markdown.read_text(), table, page


def test_the_markdown_has_means_deviations_n_the_paper_failures_and_what_is_not_supported(report):
    text, _, _ = report
    assert "| none | 0.600 ± 0.100 |  | 0.600 ± 0.000 |  |" in text
    assert "| fedup (n = 2) | 0.890 ± 0.000 | 0.990 | 0.020 ± 0.000 | 0.000 |" in text
    assert "Failed: fedup with seed 2. RuntimeError: no <b>memory</b>" in text
    assert "Not for such requests, and shown as –: logit_mask." in text
    assert "n = 3 seeds (0, 1, 2)" in text
    assert "With seed 0: A story of seed 0." in text
    assert "Retrain's own deviation from seed to seed, in points: R-A 0.00" in text


def test_every_row_of_a_markdown_table_has_as_many_cells_as_its_head(report):
    text, _, _ = report
    for table in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({line.count(" | ") for line in table.splitlines()}) == 1


def test_the_csv_has_one_line_for_each_figure_of_each_seed_and_the_papers(report):
    _, table, _ = report
    with table.open() as file:
        rows = list(csv.DictReader(file))
    none = [(row["seed"], float(row["value"])) for row in rows if (row["method"], row["figure"]) == ("none", "r_a")]
    assert none == [("0", 0.5), ("1", 0.6), ("2", 0.7)]
    fedup = [(row["seed"], row["value"]) for row in rows if (row["method"], row["figure"]) == ("fedup", "r_a")]
    assert fedup == [("0", "0.89"), ("1", "0.89"), ("paper", "0.99")]


def test_the_page_is_one_file_that_loads_nothing(report):
    text = report[2].read_text()
    assert not re.search(r'src=|href="(?!#|index\.html")', text)
    assert "no &lt;b&gt;memory&lt;/b&gt;" in text
    script = re.search(r"<script>(.*?)</script>", text, re.DOTALL)[1]
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in text  # no other script runs


def test_links_lead_to_headings(report):
    text = report[2].read_text()
    targets = re.findall(r'href="#([^"]+)"', text)
    assert targets
    assert all(f'id="{target}"' in text for target in targets)


def test_the_page_begins_with_an_overview_and_hides_rows_that_do_not_apply(report):
    text = report[2].read_text()
    assert re.findall(r"<h2[^>]*>(.+?)</h2>", text) == [
        *("Overview", "Results", "mnist-lenet5, client"),
        *("Where another method does better than FedUP, and where FedUP is the worst", "Columns"),
    ]
    matrix = text[text.index('<table class="matrix">') : text.index("</table>")]
    rows = {
        re.sub(r"<[^>]+>", "", cells[0]): cells[1:]
        for row in matrix.split("<tr")[3:]
        if (cells := re.findall(r"<t[hd].*?</t[hd]>", row))
    }
    assert list(rows) == ["retrain reference", "none before the request", "fedup"]  # no logit_mask
    shown = {name: [re.sub(r"<[^>]+>", "", cell) for cell in cells] for name, cells in rows.items()}
    assert shown["none before the request"] == ["60.0", "60.0", "0 s"]
    assert shown["fedup"] == ["89.0", "2.0", "0.50 s"]
    looks = {name: re.findall(r"near|far", "".join(cells)) for name, cells in rows.items()}
    assert looks == {"retrain reference": [], "none before the request": ["far", "far"], "fedup": ["near", "near"]}
    assert "Not for such requests: logit_mask." in text
    assert 'title="Accuracy on held-out' in text  # the glossary, where it is needed


@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs a browser: chromium")
def test_a_click_on_a_head_sorts_by_value_with_missing_ones_last_and_a_second_turns_it_round(report, tmp_path):
    text = report[2].read_text()
    tell = """<script>
    const heads = [...document.querySelectorAll("table.sortable")].find(t => t.textContent.includes("time to effect"))
    const head = name => [...heads.querySelectorAll("th")].find(th => th.textContent.trim() === name);
    const order = () => [...heads.tBodies[0].rows].map(row => row.cells[0].textContent);
    const seen = [];
    for (const name of ["time", "time", "time to effect", "method"]) { head(name).click(); seen.push(order()); }
    document.title = JSON.stringify(seen);
    </script>"""
    clicked = tmp_path / "clicked.html"
    text = re.sub(r"<meta http-equiv[^>]+>", "", text)  # which forbids scripts like the next
    clicked.write_text(text.replace("</body>", f"{tell}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"]
    done = subprocess.run(
        ["chromium", *flags, f"--user-data-dir={tmp_path / 'profile'}", "--dump-dom", clicked.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    by_time, turned, by_effect, by_name = json.loads(re.search(r"<title>(.*?)</title>", done.stdout)[1])
    assert by_time == ["none", "fedup (n = 2)", "retrain"]
    assert turned == ["retrain", "fedup (n = 2)", "none"]
    assert by_effect[0] == "fedup (n = 2)"
    assert by_name == sorted(by_name)


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        ("r_a", 0.98765, "0.988"),
        ("gap_r_a", -0.0123, "−1.23"),
        ("gap_r_a", 0.0, "+0.00"),
        ("time", 0.1234, "0.12 s"),
        ("time", 12.34, "12.3 s"),
        ("time", 1234.5, "1234 s"),
        ("bytes_up", 0, "0 B"),
        ("bytes_up", 69036424, "69.0 MB"),
        ("local_steps", 12345, "12,345"),
        ("overhead", 1.018, "1.02"),
        ("forget_loss", 0.01234, "0.012"),
        ("gap_forget_loss", -1.5, "−1.500"),
        ("restored", 1.0, "yes"),
        ("restored", 0.0, "NO"),
    ],
)
def test_values_are_shown_in_the_style_of_their_column(key, value, text):
    assert show_value(value, COLUMNS[key]) == text


def test_one_model_that_is_not_restored_is_not_rounded_away():
    assert show_figure(Figure({0: 1.0, 1: 1.0, 2: 0.0}), COLUMNS["restored"]) == "NO (2/3)"
    assert show_figure(Figure({0: 1.0, 1: 1.0}), COLUMNS["restored"]) == "yes (2/2)"


def test_a_single_seed_has_no_deviation_and_no_figure_is_a_dash():
    assert show_figure(Figure({0: 0.5}), COLUMNS["r_a"]) == "0.500"
    assert show_figure(None, COLUMNS["r_a"]) == "–"
    assert show_bytes(999) == "999 B"


def test_a_block_in_which_everything_failed_tells_the_reason_once_and_has_a_page(tmp_path):
    made_up = MadeUp(tmp_path)
    for method in ("retrain", "none", "fedup"):
        failed = {"failed": {"error": "DataError", "message": "No such\nthing.", "where": ""}}
        made_up.put("class", method, {0: failed, 1: failed})
    blocks = summarize(made_up.experiment, made_up.results)
    markdown, _, page = write_report(made_up.experiment, blocks, tables=tmp_path, pages=tmp_path)
    assert markdown.read_text().count("DataError: No such thing.") == 1
    assert "DataError: No such thing." in page.read_text()
    assert "### " not in markdown.read_text()


def test_seeds_beyond_the_experiments_own_are_reported_too(tmp_path):
    made_up = MadeUp(tmp_path)
    for cell in made_up.experiment.cells(seeds=[7], only=["class", "fedup"]):
        made_up.results.save(cell, {"machine": MACHINE, "device": "cpu", "metrics": {"r_a": 0.5}})
    (block,) = summarize(made_up.experiment, made_up.results)
    assert block.row("fedup").seeds == [7]


def test_the_floor_of_closeness_is_a_second_retrain_or_told_as_not_measured(tmp_path):
    made_up = MadeUp(tmp_path, TOML + "[methods.retrain_again]\n")
    figures = {"r_a": 0.9, "tv": 0.0, "kl": 0.0, "tow": 1.0}
    made_up.put("class", "retrain", dict.fromkeys(range(3), figures))

    def markdown() -> str:
        blocks = summarize(made_up.experiment, made_up.results)
        return write_report(made_up.experiment, blocks, tables=tmp_path, pages=tmp_path)[0].read_text()

    assert "Floor of ToW, TV and KL, a second Retrain with other seeds (`retrain_again`): not measured." in markdown()
    made_up.put("class", "retrain_again", {0: {**figures, "tv": 0.02, "kl": 0.01, "tow": 0.99}})
    assert (
        "Floor, a second Retrain with other seeds (`retrain_again`, n = 1): ToW 0.990, TV to Retrain 0.020, "
        "KL to Retrain 0.01." in markdown()
    )


@pytest.fixture
def benchmarks(tmp_path):
    """A folder with two experiments of known results; FILES are those of the first."""
    (tmp_path / "experiments").mkdir()
    for name in ("one", "two"):
        folder = tmp_path / name
        folder.mkdir()
        made_up = MadeUp(folder, TOML.replace("Made up", f"<b>{name}</b>") + GOALS)
        made_up.results = Results(tmp_path / "results" / name)
        for method, f_a in (("retrain", 0.01), ("fedup", 0.05)):
            made_up.put("client", method, {seed: {"r_a": 0.9, "f_a": f_a} for seed in range(2)})
        (folder / "made_up.toml").rename(tmp_path / "experiments" / f"{name}.toml")
    return tmp_path


GOALS = """[goals.mnist-lenet5.client]
f_a = "<= retrain.f_a + 0.01"
r_a = ">= 0.8"
"""
FILES = ["tables/one.md", "tables/one.csv", "pages/one.html"]


def written(benchmarks, *experiments):
    paths = write_tables(benchmarks, experiments)
    return [path.relative_to(benchmarks).as_posix() for path in paths if path.name not in ("times.md", "README.md")]


def test_a_report_is_remade_only_where_something_changed(benchmarks):
    two = [path.replace("one", "two") for path in FILES]
    assert written(benchmarks) == [*FILES, *two, "pages/index.html"]
    assert written(benchmarks) == []
    before = {path: (benchmarks / path).read_bytes() for path in FILES}
    for path in FILES:  # removed, or edited by hand
        (benchmarks / path).unlink()
        assert written(benchmarks) == FILES
        (benchmarks / path).write_text("edited")
        assert written(benchmarks, benchmarks / "experiments" / "one.toml") == FILES
    assert {path: (benchmarks / path).read_bytes() for path in FILES} == before
    (benchmarks / "pages" / ".one.json").write_text("{")
    assert written(benchmarks) == FILES
    (result,) = (benchmarks / "results" / "one").rglob("fedup-seed0-*.json")
    result.write_text(result.read_text().replace('"f_a": 0.05', '"f_a": 0.01'))
    assert written(benchmarks) == FILES  # the other experiment stays as it is
    result.unlink()
    assert written(benchmarks) == [*FILES, "pages/index.html"]  # its goals are met now


def test_code_that_changed_remakes_every_report(benchmarks, monkeypatch):
    written(benchmarks)
    monkeypatch.setattr("fedup.bench.result_tables._code", lambda: "another")
    assert set(FILES) < set(written(benchmarks))


def test_the_index_lists_every_experiment_with_n_and_goals(benchmarks):
    written(benchmarks)
    text = (benchmarks / "pages" / "index.html").read_text()
    assert re.findall(r'<a href="(.+?)">(.+?)</a>', text) == [
        (f"{name}.html", f"&lt;b&gt;{name}&lt;/b&gt;") for name in ("one", "two")
    ]
    assert re.findall(r'data-head="(?:n|goals met)">(.+?)<', text) == ["2", "1\xa0of\xa02"] * 2
