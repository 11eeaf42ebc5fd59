"""`/metrics` exports what its docs describe and what the dashboard asks for."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from tests.server.servers import Running, running

from . import bodies

pytestmark = pytest.mark.corpus

DOCS = Path(__file__).parents[2] / "docs"
NAME = re.compile(r"\brewarm_[a-z_]+")
SUFFIXES = ("_bucket", "_sum", "_count", "_created")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    disk = {"cache_options": {"disk": str(tmp_path_factory.mktemp("disk"))}}
    with running(engine_options=disk, warm_ahead=False) as started:
        yield started
    started.engine.core.cache.close()


@pytest.fixture(scope="module")
def exported(server: Running) -> str:
    with server.client() as client:
        for body in (bodies.request(), bodies.request(), bodies.request(1)):
            client.post("/v1/chat/completions", json=body).raise_for_status()
        return client.get("/metrics").raise_for_status().text


def names(text: str) -> set[str]:
    """Collect the names of samples, without the endings that histograms add."""
    found = set()
    for name in re.findall(r"^(rewarm_\w+)", text, re.M):
        suffix = next((s for s in SUFFIXES if name.endswith(s)), "")
        if suffix != "_created":
            found.add(name.removesuffix(suffix))
    return found


def value(text: str, sample: str) -> float:
    found = re.search(rf"^{re.escape(sample)} (\S+)$", text, re.M)
    assert found is not None, f"{sample} is not exported"
    return float(found[1])


def test_the_dashboard_asks_for_nothing_that_is_not_exported(exported: str) -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    samples = set(re.findall(r"^(rewarm_\w+)", exported, re.M))
    asked = 0
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            for name in NAME.findall(target["expr"]):
                assert name in samples, f"{panel['title']}: {name}"
                asked += 1
            for label in re.findall(r'[a-z]+="([a-z_]+)"', target["expr"]):
                assert f'="{label}"' in exported, f"{panel['title']}: {label}"
    assert asked > 30
    ids = [panel["id"] for panel in dashboard["panels"]]
    assert len(set(ids)) == len(ids)


def test_the_dashboard_is_one_that_grafana_can_lay_out() -> None:
    dashboard = json.loads((DOCS / "grafana.json").read_text())
    variables = {v["name"]: v for v in dashboard["templating"]["list"]}
    assert variables["datasource"]["type"] == "datasource"
    taken: set[tuple[int, int]] = set()
    for panel in dashboard["panels"]:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24, panel["title"]
        taken |= cells
        assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]
        for asks in (panel, *panel["targets"]):
            assert asks["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        names = [target["refId"] for target in panel["targets"]]
        assert len(set(names)) == len(names), panel["title"]


def test_every_metric_is_written_down_and_none_that_is_not_there(exported: str) -> None:
    written = set(NAME.findall((DOCS / "metrics.md").read_text()))
    assert written == names(exported)


def test_labels_are_those_that_are_written_down(exported: str) -> None:
    for name, labels in re.findall(
        r"`(rewarm_\w+)\{([a-z,]+)\}`", (DOCS / "metrics.md").read_text()
    ):
        sample = re.search(rf"^{name}(?:_bucket)?\{{(.*)\}}", exported, re.M)
        assert sample is not None, name
        assert set(re.findall(r'(\w+)="', sample[1])) - {"le"} == set(labels.split(",")), name


def test_misses_are_counted_by_reason_with_their_tokens(server: Running, exported: str) -> None:
    with server.client() as client:
        before = client.get("/metrics").text
        told = [
            client.post("/v1/chat/completions", json=body).json()["rewarm"]
            for body in (bodies.request(2), bodies.request(2), bodies.request(3))
        ]
        after = client.get("/metrics").text
    missed = [t["miss"] for t in told if t["miss"] is not None]
    assert {m["reason"] for m in missed} == {"diverged"}
    for name, expected in (
        ("rewarm_misses_total", len(missed)),
        ("rewarm_missed_tokens_total", sum(m["tokens"] for m in missed)),
    ):
        sample = f'{name}{{reason="diverged"}}'
        assert value(after, sample) - value(before, sample) == expected
    resumed = 'rewarm_restored_bytes_total{tier="memory"}'
    assert value(after, resumed) > value(before, resumed)


def test_a_scrape_does_not_look_through_the_tree(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rewarm.cache.tree import Tree

    def looked(tree: Tree) -> Iterator[None]:
        raise AssertionError("the tree was scanned")

    monkeypatch.setattr(Tree, "nodes", looked)
    with httpx.Client(base_url=server.url) as client:
        assert "rewarm_cache_tokens" in client.get("/metrics").text
        assert client.get("/v1/live").status_code == 200
