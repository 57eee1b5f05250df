"""Tables go to a server and come back with its answers, in order."""

import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from typer.testing import CliRunner

from compressor import table_writer, tables
from compressor.classify import ROWS_AT_ONCE, Columns, answered, classify_file, classify_table
from compressor.cli import app
from compressor.errors import ConfigError, DataError
from serving import (
    Client,
    DeadlineError,
    FakeClient,
    NotFoundError,
    RequestError,
    ServingError,
    TritonServer,
    UnavailableError,
    free_port,
    write,
)
from serving.model import Text
from tests.serving.conftest import score_model, tiny_model


def sentiment(text: Text) -> str:
    """What the fake knows: it refuses what has no word."""
    if not str(text).strip():
        raise RequestError("TEXT is empty")
    return "positive" if "good" in text else "negative"


def fake() -> FakeClient:
    return FakeClient(sentiment)


def late() -> FakeClient:
    """A client whose requests come back in any order."""
    draw = random.Random(1)

    def answer(text: Text) -> str:
        time.sleep(draw.random() / 2000)
        return sentiment(text)

    return FakeClient(answer)


@pytest.mark.parametrize("suffix", tables.SUFFIXES)
@pytest.mark.parametrize("to", [".csv", ".parquet"])
def test_every_row_comes_back_in_order_with_its_columns(tmp_path: Path, suffix: str, to: str) -> None:
    rows = [{"id": str(n), "review": f"{'good' if n % 3 else 'bad'} {n}"} for n in range(5 * ROWS_AT_ONCE + 7)]
    source, out = tmp_path / f"in{suffix}", tmp_path / f"out{to}"
    table_writer.write(source, rows)
    facts = classify_file(source, out, Columns(text="review"), late, in_flight=3)
    assert facts == {"rows": len(rows), "refused": 0}
    found = [fields for _, fields in tables.records(out)]
    assert [(row["id"], row["review"]) for row in found] == [(row["id"], row["review"]) for row in rows]
    assert [row["label"] for row in found] == [sentiment(row["review"]) for row in rows]
    assert {float(row["score"]) for row in found} == {1.0}
    assert {row["error"] for row in found} == {""}


def test_a_refused_row_says_why_and_its_neighbours_are_answered(tmp_path: Path) -> None:
    texts: list[Any] = ["good"] * 40
    texts[3], texts[17], texts[39] = " ", None, "bad"
    table_writer.write(tmp_path / "in.jsonl", ({"t": text, "label": 1} for text in texts))
    columns = Columns(text="t", prefix="model_")
    assert classify_file(tmp_path / "in.jsonl", tmp_path / "out.parquet", columns, fake) == {"rows": 40, "refused": 2}
    table = pq.read_table(tmp_path / "out.parquet").to_pydict()
    assert [n for n, error in enumerate(table["model_error"]) if error] == [3, 17]
    assert table["model_error"][3] == "TEXT is empty"
    assert (table["model_label"][3], table["model_score"][3]) == (None, None)
    assert table["model_label"][39] == "negative"
    assert table["label"] == [1] * 40


class Gateway(BaseHTTPRequestHandler):
    """What stands before a model server and lets nobody through: it answers each request with `status`."""

    status = 429
    asked = 0

    def do_GET(self) -> None:
        """The model's configuration."""
        labels = {"labels": {"string_value": '["negative", "positive"]'}}
        self.answer(200, {"input": [{"name": "TEXT"}], "max_batch_size": 64, "parameters": labels})

    def do_POST(self) -> None:
        """Anything else."""
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).asked += 1
        self.answer(self.status, {"error": "go away"})

    def answer(self, status: int, body: dict[str, Any]) -> None:
        raw = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@pytest.mark.parametrize(
    ("status", "requests", "error"), [(429, 3, UnavailableError), (403, 1, ServingError), (404, 1, NotFoundError)]
)
def test_a_gateway_that_turns_us_away_ends_the_job(
    monkeypatch: pytest.MonkeyPatch, status: int, requests: int, error: type[ServingError]
) -> None:
    monkeypatch.setattr(Gateway, "status", status)
    monkeypatch.setattr(Gateway, "asked", 0)
    table = pa.table({"t": ["good"] * 64})
    with ThreadingHTTPServer(("127.0.0.1", 0), Gateway) as gateway:
        thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            with (
                Client(f"127.0.0.1:{gateway.server_port}", protocol="http", retries=2) as client,
                pytest.raises(ServingError, match="go away") as found,
            ):
                classify_table(client, table, Columns(text="t"))
        finally:
            gateway.shutdown()
            thread.join()
    assert (type(found.value), Gateway.asked) == (error, requests)


def test_few_requests_find_the_bad_texts() -> None:
    client = fake()
    found = answered(client, [*["good"] * 20, "", *["bad"] * 11])
    assert [isinstance(answer, RequestError) for answer in found].index(True) == 20
    assert sum(isinstance(answer, RequestError) for answer in found) == 1
    assert len(client.calls) == 11


@pytest.mark.parametrize(
    ("row", "columns", "message"),
    [
        ({"t": "a"}, Columns(text="review"), r"in.jsonl, line 1: no column 'review'; known: t"),
        ({"t": 3}, Columns(text="t"), r"column 't' holds int 3; it must be text"),
        ({"t": "a", "label": 1}, Columns(text="t"), r"there is a column 'label' already, .*; rename it"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_before_anything_is_asked(
    tmp_path: Path, row: dict[str, Any], columns: Columns, message: str
) -> None:
    table_writer.write(tmp_path / "in.jsonl", [row])
    with pytest.raises(DataError, match=message):
        classify_file(tmp_path / "in.jsonl", tmp_path / "out.csv", columns, fake)
    assert not (tmp_path / "out.csv").exists()


def test_model_and_columns_must_fit(tmp_path: Path) -> None:
    table_writer.write(tmp_path / "in.jsonl", [{"a": "x", "b": "y"}])
    with pytest.raises(ConfigError, match="reads single texts; leave the column 'b' out"):
        classify_file(tmp_path / "in.jsonl", tmp_path / "out.csv", Columns(text="a", text_b="b"), fake)
    with pytest.raises(ConfigError, match="the model reads pairs, and 'a' is one column"):
        classify_table(FakeClient({}, pair=True), pa.table({"a": ["x"]}), Columns(text="a"))


def test_a_server_that_goes_ends_the_work_and_leaves_no_file(tmp_path: Path) -> None:
    table_writer.write(tmp_path / "in.jsonl", [{"t": f"good {n}"} for n in range(300)])

    def gone(text: Text) -> str:
        if text == "good 200":
            raise UnavailableError("no server answers")
        return "positive"

    with pytest.raises(UnavailableError, match="no server answers"):
        classify_file(tmp_path / "in.jsonl", tmp_path / "out.csv", Columns(text="t"), lambda: FakeClient(gone))
    assert [path.name for path in tmp_path.iterdir()] == ["in.jsonl"]


@pytest.mark.parametrize("times", [1, 2])
def test_a_request_that_is_late_is_sent_once_more(tmp_path: Path, times: int) -> None:
    table_writer.write(tmp_path / "in.jsonl", [{"t": f"good {n}"} for n in range(40)])
    late_for = ["good 35"] * times

    def answer(text: Text) -> str:
        if text in late_for:
            late_for.remove(str(text))
            raise DeadlineError("no answer within 30 s")
        return "positive"

    with pytest.raises(DeadlineError) if times > 1 else nullcontext():
        facts = classify_file(
            tmp_path / "in.jsonl", tmp_path / "out.csv", Columns(text="t"), lambda: FakeClient(answer)
        )
        assert facts == {"rows": 40, "refused": 0}
    assert late_for == []


def test_tables_in_memory() -> None:
    data: dict[str, Any] = {"t": ["good", None, "bad"], "n": [1, 2, 3]}
    table = classify_table(fake(), pa.table(data), Columns(text="t"))
    assert table.to_pydict() == {
        **data,
        "label": ["positive", None, "negative"],
        "score": [1.0, None, 1.0],
        "error": ["", "TEXT is empty", ""],
    }
    frame = classify_table(fake(), pd.DataFrame(data), Columns(text="t"))
    assert list(frame["label"].fillna("none")) == ["positive", "none", "negative"]
    assert list(frame.columns) == ["t", "n", "label", "score", "error"]
    score = FakeClient({("a", "b"): 2.5}, labels=(), pair=True)
    pairs = classify_table(score, pa.table({"a": ["a"], "b": ["b"]}), Columns(text="a", text_b="b"))
    assert pairs.to_pydict() == {"a": ["a"], "b": ["b"], "value": [2.5], "error": [""]}
    empty = classify_table(fake(), pa.table({"t": pa.array([], pa.string())}), Columns(text="t"))
    assert empty.column_names == ["t", "label", "score", "error"]


def test_what_the_answers_file_cannot_hold_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    table = pa.table({"text": ["good", "bad"], "raw": [None, b"\x00"]})
    pq.write_table(table, tmp_path / "in.parquet")
    never = FakeClient(lambda text: pytest.fail(f"{text} was asked"))
    with pytest.raises(DataError, match=r"in.parquet, row 2: column 'raw': .* bytes .* write .parquet"):
        classify_file(tmp_path / "in.parquet", tmp_path / "out.csv", Columns(text="text"), lambda: never)


@pytest.mark.parametrize("make", [pa.table, pd.DataFrame])
@pytest.mark.parametrize("count", [0, 2])
@pytest.mark.parametrize(
    ("names", "columns", "message"),
    [
        ("ab", Columns(text="t"), "^the table: no column 't'; known: a, b$"),
        ("ab", Columns(text="a", text_b="t"), "^the table: no column 't'; known: a, b$"),
        (["a", "b", "label"], Columns(text="a", text_b="b"), "^the table: there is a column 'label' already"),
    ],
)
def test_a_table_in_memory_that_does_not_fit_is_refused(
    make: Callable[[dict[str, list[str]]], Any], count: int, names: Sequence[str], columns: Columns, message: str
) -> None:
    client = FakeClient({}, pair=columns.text_b is not None)
    with pytest.raises(DataError, match=message):
        classify_table(client, make({name: ["x"] * count for name in names}), columns)
    assert client.calls == []


def test_a_frame_may_hold_anything_but_where_its_texts_should_be() -> None:
    mixed = pd.DataFrame({"t": ["good", 3], "n": ["a", 1]})
    with pytest.raises(DataError, match="the table, row 2: column 't' holds int 3; it must be text"):
        classify_table(fake(), mixed, Columns(text="t"))
    nothing = pd.DataFrame({"t": ["good", None, float("nan"), pd.NA, pd.NaT], "n": ["a", 1, {}, [], None]})
    assert list(classify_table(fake(), nothing, Columns(text="t"))["error"]) == ["", *["TEXT is empty"] * 4]


def test_every_row_decides_the_types_of_the_answers_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_writer, "ROWS_SEEN", 4)  # the types show after them, and the first are all refused
    rows = [
        {"t": "good" if late else "", "note": "late" if late else None, "n": 1.5 if late else 1}
        for late in [0] * 9 + [1]
    ]
    table_writer.write(tmp_path / "in.jsonl", rows)
    facts = classify_file(tmp_path / "in.jsonl", tmp_path / "out.parquet", Columns(text="t"), fake)
    assert facts == {"rows": 10, "refused": 9}
    types = {field.name: str(field.type) for field in pq.read_schema(tmp_path / "out.parquet")}
    assert types == {
        "t": "string",
        "note": "string",
        "n": "double",
        "label": "string",
        "score": "double",
        "error": "string",
    }


def test_a_row_that_does_not_fit_the_others_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    table_writer.write(tmp_path / "in.jsonl", [{"t": "good", "n": 1}, {"t": "good", "n": "one"}])
    never = FakeClient(lambda text: pytest.fail(f"{text} was asked"))
    with pytest.raises(DataError, match=r"in.jsonl, line 2 does not fit its columns' types"):
        classify_file(tmp_path / "in.jsonl", tmp_path / "out.parquet", Columns(text="t"), lambda: never)


def test_a_reason_of_many_lines_fits_in_a_cell(tmp_path: Path) -> None:
    def refuse(text: Text) -> str:
        raise RequestError("the server refused:\t<html>\r\n<head>413</head>")

    table_writer.write(tmp_path / "in.jsonl", [{"t": "good"}])
    classify_file(tmp_path / "in.jsonl", tmp_path / "out.tsv", Columns(text="t"), lambda: FakeClient(refuse))
    ((_, fields),) = tables.records(tmp_path / "out.tsv")
    assert fields["error"] == "the server refused: <html> <head>413</head>"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (pd.DataFrame([["a", "b"]], columns=["t", "t"]), "^the table: 2 columns are named 't'; give one"),
        (pa.table([["a"], ["b"]], names=["t", "t"]), "^the table: 2 columns are named 't'; give one"),
        (pd.DataFrame([["a"]], columns=pd.MultiIndex.from_tuples([("t", "x")])), "^the table: no column 't'; known: "),
        (pd.DataFrame([["a", 1]], columns=["a", 0]), "^the table: no column 't'; known: 0, a$"),
        ({"t": ["a"]}, "^the table is of type dict; give an Arrow table or a pandas DataFrame$"),
    ],
)
def test_a_table_in_memory_without_one_column_of_texts_is_refused(table: Any, message: str) -> None:
    client = fake()
    with pytest.raises(DataError, match=message):
        classify_table(client, table, Columns(text="t"))
    assert client.calls == []


def test_a_record_batch_is_a_table() -> None:
    found = classify_table(fake(), pa.record_batch({"t": ["good"]}), Columns(text="t"))
    assert found.to_pydict() == {"t": ["good"], "label": ["positive"], "score": [1.0], "error": [""]}


@pytest.mark.triton
@pytest.mark.parametrize("protocol", ["grpc", "http"])
def test_a_real_server_answers_a_file(tmp_path: Path, protocol: str) -> None:
    write(tiny_model(tmp_path / "model"), tmp_path / "repository")
    write(score_model(tmp_path / "score"), tmp_path / "repository")
    ports: dict[str, Any] = {name: free_port() for name in ("http_port", "grpc_port", "metrics_port")}
    rows = [{"a": "good film", "b": "bad"}, {"a": "", "b": "good"}, {"a": "bad bad", "b": "good"}] * 30
    table_writer.write(tmp_path / "in.parquet", rows)
    with TritonServer(tmp_path / "repository", **ports) as server:
        url = server.grpc_url if protocol == "grpc" else server.http_url
        run = ["classify-file", str(tmp_path / "in.parquet"), str(tmp_path / "out.csv"), "--url", url]
        run += ["--protocol", protocol, "--text"]
        shown = CliRunner().invoke(app, [*run, "a"])
        assert (shown.exit_code, shown.stdout) == (0, f"{tmp_path / 'out.csv'}: 90 rows, 30 of them refused\n")
        found = [fields for _, fields in tables.records(tmp_path / "out.csv")]
        assert [row["label"] for row in found] == ["positive", "", "negative"] * 30
        assert "TEXT is empty" in found[1]["error"]
        shown = CliRunner().invoke(app, [*run, "a", "--text-b", "b", "--model", "stsb", "--overwrite", "--json"])
        assert '"rows": 90, "refused": 30' in shown.stdout
        found = [fields for _, fields in tables.records(tmp_path / "out.csv")]
        assert float(found[0]["value"]) == 2.0
