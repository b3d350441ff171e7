"""The HTML report: what it holds, that it needs no network, and that its figures show the metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go
import pytest

from moesys.report import main

VOID = {"meta", "input", "br", "img", "link", "hr"}
LINKS = ("src", "href", "srcset", "action", "data", "poster", "formaction", "xlink:href")
WriteRun = Callable[..., Path]


class Page(HTMLParser):
    """Elements, visible text, scripts and figures of a page; fails on elements that do not nest."""

    def __init__(self, path: Path) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text, self.styles = "", ""
        self.figures: dict[str, dict[str, Any]] = {}
        self.feed(path.read_text(encoding="utf-8"))
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] == "style":
            self.styles += data
        elif self.open and self.open[-1] == "script":
            attributes = self.tags[-1][1]
            if attributes.get("type") == "application/json":
                assert "<" not in data
                self.figures[str(attributes["id"])] = json.loads(data)
        else:
            self.text += data

    @property
    def plain(self) -> str:
        return " ".join(self.text.split())


@pytest.fixture(name="moe", scope="session")
def moe_fixture(tmp_path_factory: pytest.TempPathFactory, write_run: WriteRun) -> Path:
    """A run of 400 steps with 5 MoE layers; not to be written to, save for its report."""
    return write_run(tmp_path_factory.mktemp("runs") / "tiny-deepseek-001", steps=400)


def report(capsys: pytest.CaptureFixture[str], *arguments: object) -> Page:
    assert main([str(argument) for argument in arguments]) == 0
    return Page(Path(capsys.readouterr().out.strip()))


def rows(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_one_run_has_every_chart(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(capsys, moe)
    assert list(page.figures) == [
        "ce-loss", "eval-bits-per-byte", "lr", "grad-norm", "load-balance-loss", "z-loss",
        "tokens-per-second", "peak-memory-bytes",
        *(f"run-0-load-{layer}" for layer in (1, 2, 3, 4, 5)),
        "run-0-max-violation", "run-0-entropy", "run-0-dead",
    ]  # fmt: skip
    boxes = [attributes["data-figure"] for _, attributes in page.tags if attributes.get("class") == "plot"]
    assert boxes == list(page.figures)
    assert "0 at every step in every layer." in page.text  # the drops, which have no chart


def test_plotly_accepts_every_figure(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for figure in report(capsys, moe).figures.values():
        go.Figure(figure)  # raises on a property that plotly does not know


def test_the_head_tells_what_was_trained(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, moe).plain
    assert "Ended after 400 steps." in text
    assert "The model needs 1.585 bits per byte of held-out text, 12% fewer than the 1.802 of xz -9." in text
    for piece in (
        "Tokens1.60 M", "Parameters10.3 M", "Active parameters5.62 M", "Wall time9 min 12 s",
        "16 routed, top-4, and 1 shared", "stdlib, tokenizer bpe", "torch 2.13.0",
        "moesys train --data.source 'my texts'", "optimizer.lr = 0.003",
    ):  # fmt: skip
        assert piece in text
    assert "None" not in text


def test_charts_show_the_metrics(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figures = report(capsys, moe).figures
    lines = rows(moe)
    raw, smoothed, held_out = figures["ce-loss"]["data"]
    assert raw["x"] == list(range(1, 401))
    np.testing.assert_allclose(raw["y"], [line["ce_loss"] for line in lines], rtol=1e-4)
    np.testing.assert_allclose(smoothed["y"][200], np.mean(raw["y"][196:205]), rtol=1e-4)
    assert held_out["x"] == [250, 400]
    bits, xz = figures["eval-bits-per-byte"]["data"]
    np.testing.assert_allclose(bits["y"], [lines[249]["eval_bits_per_byte"], 1.5854], rtol=1e-4)
    assert xz["y"] == [1.8021, 1.8021] and xz["line"]["dash"] == "dash"
    np.testing.assert_allclose(figures["peak-memory-bytes"]["data"][0]["y"][-1], 1.5e9 / 2**30, rtol=1e-3)
    layer = figures["run-0-entropy"]["data"][2]
    assert layer["name"] == "layer 3"
    entropy = [line["experts"]["3"]["entropy"] / math.log(16) for line in lines]
    np.testing.assert_allclose(layer["y"], entropy, rtol=1e-4)


def test_load_maps_are_even_at_one(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    figure = report(capsys, moe).figures["run-0-load-4"]
    (trace,) = figure["data"]
    assert np.shape(trace["z"]) == (16, 300)
    share = np.array([line["experts"]["4"]["share"] for line in rows(moe)])
    np.testing.assert_allclose(np.mean(trace["z"], axis=0), 1.0, atol=1e-2)  # shares of a step add up to 1
    edges = np.linspace(0, 400, 301).astype(int)
    np.testing.assert_allclose(
        np.array(trace["z"])[:, 150], share[edges[150] : edges[151]].mean(0) * 16, atol=1e-3
    )
    centre = (1 - trace["zmin"]) / (trace["zmax"] - trace["zmin"])
    scale = dict(trace["colorscale"])
    lightness = {place: sum(bytes.fromhex(colour[1:])) for place, colour in scale.items()}
    assert max(lightness, key=lambda place: lightness[place]) == centre
    assert figure["layout"]["yaxis"]["autorange"] == "reversed"


def test_nothing_is_fetched(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = report(capsys, moe)
    for tag, attributes in page.tags:
        assert tag not in ("link", "iframe", "object", "embed", "base", "img")
        assert not set(attributes) & set(LINKS)
    assert "url(" not in page.styles and "@import" not in page.styles
    policies = [attributes for _, attributes in page.tags if "http-equiv" in attributes]
    assert len(policies) == 1
    assert policies[0]["http-equiv"] == "Content-Security-Policy"
    rules = dict(rule.strip().split(" ", 1) for rule in str(policies[0]["content"]).split(";"))
    assert rules["default-src"] == "'none'"
    assert not any("http" in rule or "*" in rule or "'self'" in rule for rule in rules.values())


def test_the_library_is_there_once(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report(capsys, moe)
    text = (moe / "report.html").read_text(encoding="utf-8")
    assert text.count("plotly.js v") == 1
    assert 3e6 < len(text) < 6e6


def test_every_quantity_is_explained(moe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = report(capsys, moe).plain
    for sentence in (
        "Load of the busiest expert over the mean load, minus 1", "Experts that got no token at all",
        "Length of the gradient over all parameters", "the compressor xz -9", "Mean cross-entropy",
        "1 is an even load, 0 sends everything to one expert", "its smallest and largest value stay",
        "The last held-out value of an ended run is its final evaluation",
    ):  # fmt: skip
        assert sentence in text


def test_a_dense_run_has_no_expert_section(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    page = report(capsys, write_run(tmp_path / "dense", steps=120, layers=()))
    assert not any(key.startswith("run-0") for key in page.figures)
    assert "load-balance-loss" not in page.figures  # 0 throughout
    assert "Expert" not in page.plain and "Heat map" not in page.plain


@pytest.mark.parametrize("layers", [(1, 2), ()])
def test_a_run_of_one_step(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str], layers: tuple[int, ...]
) -> None:
    page = report(capsys, write_run(tmp_path / "one", steps=1, planned=1000, layers=layers, ended=False))
    assert "In progress or interrupted: step 1 of 1,000." in page.plain
    assert "No evaluation on held-out text yet." in page.plain
    assert "eval-bits-per-byte" not in page.figures
    (trace,) = page.figures["ce-loss"]["data"]
    assert trace["x"] == [1] and trace["mode"] == "lines+markers"


def test_a_run_in_progress_estimates_and_counts(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def steady(line: dict[str, Any]) -> None:
        line["tokens_per_second"] = 2000.0

    run = write_run(tmp_path / "going", steps=60, planned=100, ended=False, change=steady)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "tok')
    text = report(capsys, run).plain
    assert "step 60 of 100" in text
    assert "Wall timeabout 2 min 0 s" in text  # 60 steps of 4,000 tokens at 2,000 a second
    assert "Parameters12.4 M" in text  # tiny-deepseek with six layers, counted from its configuration
    assert "The last line of metrics.jsonl is not whole" in text


def test_a_summary_from_before_the_run_went_on_is_not_believed(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    run = write_run(tmp_path / "longer", steps=30, planned=40)
    summary = json.loads((run / "summary.json").read_text())
    (run / "summary.json").write_text(json.dumps(summary | {"steps": 20}))
    text = report(capsys, run).plain
    assert "step 30 of 40" in text and "1.585" not in text


def test_null_leaves_a_gap_and_is_told(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(line: dict[str, Any]) -> None:
        if line["step"] in (50, 51):
            line |= {"loss": None, "ce_loss": None, "grad_norm": None, "z_loss": None}
            line["experts"]["1"] |= {"share": [None] * 16, "max_violation": None, "entropy": None}

    page = report(capsys, write_run(tmp_path / "lost", steps=300, change=lose))
    for trace in page.figures["ce-loss"]["data"][:2]:
        assert [place for place, value in enumerate(trace["y"]) if value is None] == [49, 50]
    assert [row[49] for row in page.figures["run-0-load-1"]["data"][0]["z"]] == [None] * 16
    assert "2 steps had a loss or gradient that was not finite (50, 51)" in page.plain


def test_a_run_that_never_had_a_finite_value(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def lose(line: dict[str, Any]) -> None:
        line |= dict.fromkeys(set(line) - {"step", "tokens", "experts"})
        for layer in line["experts"].values():
            layer |= dict.fromkeys(set(layer) - {"share"}) | {"share": [None] * 16}

    page = report(capsys, write_run(tmp_path / "lost", steps=5, ended=False, change=lose))
    assert "5 steps had a loss or gradient that was not finite" in page.plain
    assert "ce-loss" not in page.figures


def test_several_runs_share_charts_and_are_told_apart(
    tmp_path: Path, moe: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    dense = write_run(tmp_path / "dense", steps=300, layers=(), lr=1e-3)
    out = tmp_path / "both.html"
    page = report(capsys, moe, dense, "--out", out)
    assert out.exists()
    traces = page.figures["ce-loss"]["data"]
    colours = {trace["meta"]: trace["line"]["color"] for trace in traces}
    assert set(colours) == {0, 1} and len(set(colours.values())) == 2
    assert all(trace["line"]["color"] == colours[trace["meta"]] for trace in traces)
    assert [trace["meta"] for trace in page.figures["z-loss"]["data"]] == [0, 0]  # the dense run has none
    assert any(key.startswith("run-0-load") for key in page.figures)
    assert not any(key.startswith("run-1-") for key in page.figures)
    boxes = [attributes["value"] for tag, attributes in page.tags if tag == "input"]
    assert boxes == ["0", "1"]
    text = page.plain
    assert "optimizer.lr0.0030.001" in text and "training.steps400300" in text
    assert "training.batch_size1616" not in text and "run_dir/" not in text
    for figure in page.figures.values():
        go.Figure(figure)


def test_the_best_of_a_row_is_marked(
    tmp_path: Path, moe: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    better = write_run(tmp_path / "better", steps=20)
    summary = json.loads((better / "summary.json").read_text())
    (better / "summary.json").write_text(json.dumps(summary | {"eval_bits_per_byte": 1.25}))
    report(capsys, moe, better, "--out", tmp_path / "x.html")
    html = (tmp_path / "x.html").read_text()
    assert "<td>1.585</td><td class=best>1.250</td>" in html
    assert "<td>1.802</td><td>1.802</td>" in html


def test_runs_of_one_name_get_their_parents(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [write_run(tmp_path / parent / "run", steps=12) for parent in ("a", "b")]
    page = report(capsys, *runs)
    assert "a/run" in page.plain and "b/run" in page.plain
    assert (runs[0] / "comparison.html").exists()
    assert not (runs[0] / "report.html").exists()


def test_names_cannot_become_markup(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "<b onclick=x>&amp;"
    loss = '"></script><b onclick=x>_loss'

    def add(line: dict[str, Any]) -> None:
        line[loss] = 1.0

    runs = [write_run(tmp_path / other, steps=12, change=add) for other in (name, "plain")]
    page = report(capsys, *runs)
    assert loss.replace("_", "-") in page.figures
    assert not any("onclick" in attributes for _, attributes in page.tags)
    assert name in page.plain
    names = {trace["name"] for trace in page.figures["lr"]["data"]}
    assert names == {"&lt;b onclick=x&gt;&amp;amp;", "plain"}  # plotly undoes this, and reads no tags in it


def test_long_runs_with_many_experts_stay_small(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def spike(line: dict[str, Any]) -> None:
        if line["step"] == 3333:
            line["grad_norm"] = 777.0

    long = write_run(tmp_path / "long", steps=6000, layers=(1, 2), num_experts=8, change=spike)
    wide = write_run(tmp_path / "wide", steps=150, layers=range(1, 27), num_experts=64)
    page = report(capsys, long, wide, "--out", tmp_path / "x.html")
    curves = [
        trace for figure in page.figures.values() for trace in figure["data"] if trace["type"] == "scatter"
    ]
    assert max(len(trace["x"]) for trace in curves) <= 2000
    assert max(page.figures["grad-norm"]["data"][0]["y"]) == 777.0
    assert page.figures["run-1-entropy"]["data"][0]["type"] == "heatmap"  # 26 layers: a row each
    assert np.shape(page.figures["run-1-entropy"]["data"][0]["z"])[0] == 26
    assert (tmp_path / "x.html").stat().st_size < 8e6
    for figure in page.figures.values():
        go.Figure(figure)


def test_where_the_page_cannot_be_written(moe: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a folder; name the file to write"):
        main([str(moe), "--out", str(tmp_path)])
    with pytest.raises(OSError, match=r"cannot be written to .*missing.* No such file.*--out"):
        main([str(moe), "--out", str(tmp_path / "missing" / "x.html")])


def test_the_final_evaluation_need_not_stand_in_the_metrics(
    tmp_path: Path, write_run: WriteRun, capsys: pytest.CaptureFixture[str]
) -> None:
    def drop(line: dict[str, Any]) -> None:
        for name in ("eval_loss", "eval_bits_per_byte", "eval_tokens"):
            line.pop(name, None)

    page = report(capsys, write_run(tmp_path / "run", steps=30, change=drop))
    bits = page.figures["eval-bits-per-byte"]["data"][0]
    assert (bits["x"], bits["y"]) == ([30], [1.5854])
    assert page.figures["ce-loss"]["data"][-1]["y"] == [2.71]
