"""Rows of files, read and written: headers, class labels by name, and that no more is read than is asked for."""

from __future__ import annotations

from datetime import UTC, date, datetime, time, timedelta
from decimal import Decimal
from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor import table_writer
from compressor.errors import DataError
from compressor.table_writer import Form, check_cells, write
from compressor.tables import dataset_records, lines, records

COLA = ("source", "label", "mark", "sentence")


def fields_of(path, **options) -> list[dict]:
    return [fields for _, fields in records(path, **options)]


@pytest.mark.parametrize("text", ["a\t1\t\tgood\n", "source\tlabel\tmark\tsentence\na\t1\t\tgood\n"])
def test_a_tsv_file_may_have_no_header_line_and_may_have_one_all_the_same(text, tmp_path):
    (tmp_path / "x.tsv").write_text(text, encoding="utf-8")
    assert fields_of(tmp_path / "x.tsv", header=COLA) == [{"source": "a", "label": "1", "mark": "", "sentence": "good"}]


def test_a_row_that_does_not_fit_the_given_header_is_named(tmp_path):
    (tmp_path / "x.tsv").write_text("a\t1\t\tgood\na\t1\tgood\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"x.tsv, line 2: 3 columns; a row needs 4; correct or drop it"):
        fields_of(tmp_path / "x.tsv", header=COLA)


def test_a_column_that_is_there_twice_in_a_parquet_file_is_refused(tmp_path):
    columns = [pa.array(["a"]), pa.array([1]), pa.array(["b"])]
    pq.write_table(pa.Table.from_arrays(columns, names=["text", "label", "text"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet: column 'text' is there twice; rename one"):
        fields_of(tmp_path / "x.parquet")


@pytest.mark.parametrize("metadata", [b'{"info": null}', b'{"info": {"features": null}}'])
def test_metadata_of_a_parquet_file_may_say_nothing(metadata, tmp_path):
    table = pa.table({"text": ["a"]}).replace_schema_metadata({b"huggingface": metadata})
    pq.write_table(table, tmp_path / "x.parquet")
    assert fields_of(tmp_path / "x.parquet") == [{"text": "a"}]


def test_a_date_that_python_does_not_have_is_named(tmp_path):
    far = pa.array([2**62], pa.timestamp("us"))
    pq.write_table(pa.table({"text": ["a"], "when": far}), tmp_path / "x.parquet")
    with pytest.raises(
        DataError, match=r"x.parquet holds a value that cannot be read \(.*\); correct its column or dr"
    ):
        fields_of(tmp_path / "x.parquet")


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("x.csv", "a,b\r1,2\r", r"line 1: a carriage return stands outside quotes; end lines with LF or CRLF"),
        ("x.jsonl", '{"a":' + "[" * 100_000, r"x.jsonl, line 1: JSON of too many levels; correct or drop the row"),
    ],
)
def test_what_a_library_says_of_a_file_has_a_remedy(name, text, sentence, tmp_path):
    (tmp_path / name).write_bytes(text.encode())
    with pytest.raises(DataError, match=sentence):
        fields_of(tmp_path / name)


@pytest.mark.parametrize(("name", "text"), [("x.tsv", "a\tb\ta\n1\t2\t3\n"), ("x.csv", "a,b,a\n1,2,3\n")])
def test_a_column_that_is_there_twice_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"{name}, line 1: column 'a' is there twice; rename one"):
        fields_of(tmp_path / name)


def test_columns_without_a_name_may_be_many(tmp_path):
    (tmp_path / "x.csv").write_text("a,,\n1,2,3\n", encoding="utf-8")
    assert fields_of(tmp_path / "x.csv")[0]["a"] == "1"


@pytest.mark.parametrize(
    ("name", "text"), [("x.csv", "text;label\na, b;c\n"), ("x.tsv", "text,label\na\tb\n"), ("x.csv", "a\tb\n1,2\n")]
)
def test_a_table_with_other_separators_is_named(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    sentence = r"line 2: 2 columns; a row needs 1; .*; columns of a .csv file are separated by commas, and of a .tsv fi"
    with pytest.raises(DataError, match=sentence):
        fields_of(tmp_path / name)


def test_one_column_may_have_any_name(tmp_path):
    (tmp_path / "x.csv").write_text("text;label\na;b\n", encoding="utf-8")
    assert fields_of(tmp_path / "x.csv") == [{"text;label": "a;b"}]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_an_ending_may_have_capitals(ending, tmp_path):
    write(tmp_path / f"x.{ending.upper()}", [{"a": "b"}])
    write(tmp_path / f"y.{ending}", [{"a": "b"}])
    assert fields_of(tmp_path / f"x.{ending.upper()}") == [{"a": "b"}]
    assert (tmp_path / f"x.{ending.upper()}").read_bytes() == (tmp_path / f"y.{ending}").read_bytes()


def test_rows_are_read_as_they_are_asked_for(tmp_path):
    (tmp_path / "x.tsv").write_text("a\tb\n1\t2\nbroken\n", encoding="utf-8")
    assert list(islice(records(tmp_path / "x.tsv"), 1)) == [(f"{tmp_path / 'x.tsv'}, line 2", {"a": "1", "b": "2"})]


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(DataError, match=r"absent.tsv does not exist"):
        list(lines(tmp_path / "absent.tsv"))


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(DataError, match=r"cannot be read: Is a directory"):
        list(lines(tmp_path))


def labelled() -> datasets.Dataset:
    features = datasets.Features({"text": datasets.Value("string"), "label": datasets.ClassLabel(names=["no", "yes"])})
    return datasets.Dataset.from_dict({"text": ["a", "b", "c"], "label": [1, 0, -1]}, features=features)


def test_class_labels_of_a_data_set_are_read_by_name_and_withheld_ones_stay():
    found = list(dataset_records(labelled(), "hub:x, test"))
    assert found[0] == ("hub:x, test, row 1", {"text": "a", "label": "yes"})
    assert [fields["label"] for _, fields in found] == ["yes", "no", -1]


def test_class_labels_of_a_parquet_file_that_datasets_wrote_are_read_by_name(tmp_path):
    labelled().to_parquet(tmp_path / "x.parquet")
    assert [fields["label"] for fields in fields_of(tmp_path / "x.parquet")] == ["yes", "no", -1]


def test_one_column_of_a_parquet_file_can_be_read_alone(tmp_path):
    pq.write_table(pa.table({"text": ["a"], "label": [1]}), tmp_path / "x.parquet")
    assert fields_of(tmp_path / "x.parquet", only="label") == [{"label": 1}]
    assert fields_of(tmp_path / "x.parquet", only="topic") == [{"text": "a", "label": 1}]


def test_a_damaged_parquet_file_is_named(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"text": ["some text"] * 50}), path, compression="gzip", use_dictionary=False)
    raw = bytearray(path.read_bytes())
    raw[40:60] = b"\xff" * 20
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file, or damaged: "):
        fields_of(path)


def test_text_of_a_parquet_file_that_is_no_utf_8_is_named(tmp_path):
    pq.write_table(pa.table({"text": pa.array([b"\xff"]).view(pa.string())}), tmp_path / "x.parquet")
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file, or damaged: 'utf-8' codec can't decode"):
        fields_of(tmp_path / "x.parquet")


@pytest.mark.parametrize("row", [r'{"text": "cut \ud83d"}', r'{"text": [{"n": "\udc4d"}]}', r'{"\ud83d": "text"}'])
def test_half_a_character_is_refused_where_it_is_read(row, tmp_path):
    (tmp_path / "x.jsonl").write_text(r'{"text": "\ud83d\udc4d \\ud83d \u00e9"}' + f"\n{row}\n", encoding="utf-8")
    rows = records(tmp_path / "x.jsonl")
    assert next(rows)[1] == {"text": "👍 \\ud83d é"}
    with pytest.raises(DataError, match=r"x.jsonl, line 2: the row holds half a character \('\\ud[0-9a-f]{3}'\)"):
        next(rows)


def test_a_long_document_is_read_whole(tmp_path):
    (tmp_path / "x.csv").write_text("text\n" + "word " * 40_000 + "\n", encoding="utf-8")
    assert len(fields_of(tmp_path / "x.csv")[0]["text"]) == 200_000


WRITTEN = [{"text": 'a "good", film', "n": 1}, {"text": "two\nlines", "n": 2}]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_rows_that_are_written_are_read_back(ending, tmp_path):
    assert write(tmp_path / f"x.{ending}", iter(WRITTEN)) == 2
    expected = WRITTEN if ending != "csv" else [row | {"n": str(row["n"])} for row in WRITTEN]
    assert fields_of(tmp_path / f"x.{ending}") == expected
    assert [path.name for path in tmp_path.iterdir()] == [f"x.{ending}"]


def test_cells_that_are_no_text_are_written_as_json_and_none_as_nothing(tmp_path):
    write(tmp_path / "x.csv", [{"a": None, "b": True, "c": 1.5, "d": ["é"]}])
    assert (tmp_path / "x.csv").read_text(encoding="utf-8") == 'a,b,c,d\n,true,1.5,"[""é""]"\n'


@pytest.mark.parametrize("cell", ["two\rlines", "\r", "end\r", "\r\n", "\n", "", " ", '"', ",", "\x00", "\u2028", "'"])
def test_a_csv_file_gives_every_cell_back(cell, tmp_path):
    rows = [{"text": cell, cell + "n": "1"}, {"text": "b", cell + "n": cell}]
    write(tmp_path / "x.csv", rows)
    assert fields_of(tmp_path / "x.csv") == rows
    write(tmp_path / "y.csv", [{"text": cell}])
    assert fields_of(tmp_path / "y.csv") == [{"text": cell}]
    assert b"\r\n" not in (tmp_path / "x.csv").read_bytes().replace(cell.encode(), b"")


VALUES = {
    "day": (date(2020, 1, 31), "2020-01-31"),
    "when": (datetime(2020, 1, 31, 7, 8, 9, tzinfo=UTC), "2020-01-31T07:08:09+00:00"),
    "hour": (time(7, 8, 9), "07:08:09"),
    "price": (Decimal("1.50"), "1.50"),
    "took": (timedelta(hours=25), "1 day, 1:00:00"),
}


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
def test_dates_times_and_decimals_of_a_parquet_file_are_written_as_text(ending, tmp_path):
    row = {name: value for name, (value, _) in VALUES.items()}
    pq.write_table(pa.Table.from_pylist([row | {"days": [row["day"]]}]), tmp_path / "x.parquet")
    write(tmp_path / f"x.{ending}", fields_of(tmp_path / "x.parquet"))
    days = ["2020-01-31"] if ending == "jsonl" else '["2020-01-31"]'
    assert fields_of(tmp_path / f"x.{ending}") == [{name: text for name, (_, text) in VALUES.items()} | {"days": days}]


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl"])
@pytest.mark.parametrize("value", [b"a", [b"a"], {"a": b"a"}])
def test_bytes_are_refused_but_in_a_parquet_file(value, ending, tmp_path):
    reason = rf"a value to be written is bytes b'a', which a .{ending} file cannot hold; write .parquet"
    with pytest.raises(DataError, match=reason):
        write(tmp_path / f"x.{ending}", [{"n": value}])
    reason = rf"line 7: column 'n': a value to be written is bytes b'a', which a .{ending} file cannot hold"
    with pytest.raises(DataError, match=reason):
        check_cells("line 7", {"m": 1, "n": value}, tmp_path / f"x.{ending}")
    check_cells("line 7", {"n": value}, tmp_path / "x.parquet")


def test_a_tsv_file_holds_quotes_as_they_are_and_no_line_ends(tmp_path):
    write(tmp_path / "x.tsv", WRITTEN[:1])
    assert (tmp_path / "x.tsv").read_bytes() == b'text\tn\na "good", film\t1\n'
    with pytest.raises(DataError, match=r"row 2 to be written has a tab or line end in 'two\\nlines'"):
        write(tmp_path / "y.tsv", WRITTEN)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tsv"]


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_a_row_with_other_columns_is_refused(ending, tmp_path):
    with pytest.raises(DataError, match=r"row 2 to be written has columns 'm', and the first 'n'; give every row"):
        write(tmp_path / f"x.{ending}", [{"n": 1}, {"m": 1}])
    assert not list(tmp_path.iterdir())


def test_columns_are_written_in_the_order_of_the_first_row(tmp_path):
    write(tmp_path / "x.csv", [{"a": 1, "b": 2}, {"b": 4, "a": 3}])
    assert (tmp_path / "x.csv").read_text() == "a,b\n1,2\n3,4\n"


def test_a_parquet_file_keeps_the_types_of_another_and_names_class_labels(tmp_path):
    schema = pa.schema([("n", pa.int8()), ("text", pa.large_string())])
    pq.write_table(pa.Table.from_pylist([{"n": 1, "text": "a"}], schema=schema), tmp_path / "like.parquet")
    write(tmp_path / "x.parquet", [{"n": 2, "text": "b", "new": 1.0}], like=tmp_path / "like.parquet")
    assert pq.read_schema(tmp_path / "x.parquet") == schema.append(pa.field("new", pa.float64()))
    labelled().to_parquet(tmp_path / "labels.parquet")
    write(tmp_path / "y.parquet", fields_of(tmp_path / "labels.parquet")[:2], like=tmp_path / "labels.parquet")
    assert pq.read_schema(tmp_path / "y.parquet").field("label").type == pa.string()


def test_a_value_of_another_type_than_the_first_ones_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(table_writer, "ROWS_SEEN", 2)
    with pytest.raises(DataError, match=r"a row after 2 does not fit its columns' types \(.*\); write .jsonl"):
        write(tmp_path / "x.parquet", [{"n": 1}, {"n": 2}, {"n": "three"}])
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere/x.csv cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "x.csv", WRITTEN)
    with pytest.raises(DataError, match=r"x.txt ends in '.txt'; data files end in .tsv, .csv, .jsonl, .parquet"):
        write(tmp_path / "x.txt", WRITTEN)


def form_of(out, *rows, like=None) -> Form:
    form = Form(out, like)
    for number, row in enumerate(rows, start=1):
        form.add(f"line {number}", row)
    return form


@pytest.mark.parametrize("at_once", [1, 2, 100])
def test_the_types_of_a_parquet_file_come_from_all_rows(at_once, monkeypatch, tmp_path):
    monkeypatch.setattr(table_writer, "ROWS_AT_ONCE", at_once)
    monkeypatch.setattr(table_writer, "ROWS_SEEN", 1)
    rows: list[dict] = [{"a": None, "b": 1, "c": [1]}, {"a": "text", "b": 2.5, "c": []}, {"c": None, "b": 3, "a": None}]
    schema = form_of(tmp_path / "x.parquet", *rows).schema()
    assert schema == pa.schema([("a", pa.string()), ("b", pa.float64()), ("c", pa.list_(pa.int64()))])
    write(tmp_path / "x.parquet", rows, schema=schema)
    assert fields_of(tmp_path / "x.parquet") == rows


@pytest.mark.parametrize("at_once", [1, 2, 100])
@pytest.mark.parametrize("value", ["three", True, 2**70, {"n": 1}])
def test_a_row_that_fits_no_type_of_a_parquet_file_is_named(value, at_once, monkeypatch, tmp_path):
    monkeypatch.setattr(table_writer, "ROWS_AT_ONCE", at_once)
    with pytest.raises(DataError, match=r"line 3 does not fit its columns' types \(.*\); write .jsonl"):
        form_of(tmp_path / "x.parquet", {"n": None}, {"n": 2}, {"n": value}, {"n": 4}).schema()


def test_a_damaged_file_gives_no_types(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"text")
    with pytest.raises(DataError, match=r"x.parquet is not a Parquet file, or damaged: "):
        Form(tmp_path / "y.parquet", tmp_path / "x.parquet")


def test_columns_that_a_parquet_file_cannot_hold_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"x.parquet cannot hold the columns \(.*\); write .jsonl"):
        form_of(tmp_path / "x.parquet", {"n": {}}).schema()


def test_types_of_another_parquet_file_go_before_those_that_are_found(tmp_path):
    schema = pa.schema([("n", pa.int8()), ("when", pa.timestamp("ms"))])
    pq.write_table(pa.Table.from_pylist([{"n": 1, "when": 1}], schema=schema), tmp_path / "like.parquet")
    rows = [fields | {"new": 1} for fields in fields_of(tmp_path / "like.parquet")]
    found = form_of(tmp_path / "x.parquet", *rows, like=tmp_path / "like.parquet").schema()
    assert found == schema.append(pa.field("new", pa.int64()))
    labelled().to_parquet(tmp_path / "labels.parquet")
    rows = fields_of(tmp_path / "labels.parquet")
    with pytest.raises(DataError, match=r"line 3 does not fit"):  # the name of a label, then a code without one
        form_of(tmp_path / "x.parquet", *rows, like=tmp_path / "labels.parquet").schema()


@pytest.mark.parametrize("row", [{"n": "a\tb"}, {"n": "a\n"}, {"n": ["a"], "m\t": 1}])
def test_what_breaks_a_line_of_a_tsv_file_is_found_before_it_is_written(row, tmp_path):
    with pytest.raises(DataError, match=r"line 1 has a tab or line end in .*; write .csv, .jsonl or .parquet"):
        form_of(tmp_path / "x.tsv", row)
    assert form_of(tmp_path / "x.csv", row).schema() is None


def test_an_empty_line_among_rows_of_one_column_is_named(tmp_path):
    path = tmp_path / "a.tsv"
    path.write_text("text\nfilm\n\n\nplot\n")
    with pytest.raises(DataError, match=r"a\.tsv, line 3: an empty line, which with one column could be a row without"):
        list(records(path))
    path.write_text("\ntext\nfilm\nplot\n\n\n")  # at the end, or before the header, it is no row
    assert [fields["text"] for _, fields in records(path)] == ["film", "plot"]
    path.write_text("text\tlabel\nfilm\t1\n\nplot\t0\n")
    assert len(list(records(path))) == 2


@pytest.mark.parametrize("ending", ["parquet", "csv"])
def test_a_time_that_would_be_cut_is_refused_and_a_whole_one_kept(tmp_path, ending):
    source, out = tmp_path / "in.parquet", tmp_path / f"out.{ending}"
    for nanoseconds, whole in ((1000, True), (1001, False)):
        pq.write_table(pa.table({"at": pa.array([None, nanoseconds], pa.time64("ns"))}), source)
        if whole:
            form = Form(out, source)
            for where, fields in records(source):
                form.add(where, fields)
            write(out, (fields for _, fields in records(source)), schema=form.schema())
            assert "00:00:00.000001" in str([fields["at"] for _, fields in records(out)][1])
        else:
            with pytest.raises(DataError, match=r"in\.parquet: column 'at' holds times of day in nanoseconds, which"):
                Form(out, source)
