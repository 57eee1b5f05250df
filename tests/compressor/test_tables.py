"""Rows of files: headers, class labels by name, and that no more is read than is asked for."""

from __future__ import annotations

from itertools import islice

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from compressor import tables
from compressor.errors import DataError
from compressor.tables import dataset_records, lines, records, write

COLA = ("source", "label", "mark", "sentence")


def fields_of(path, **options) -> list[dict]:
    return [fields for _, fields in records(path, **options)]


@pytest.mark.parametrize("text", ["a\t1\t\tgood\n", "source\tlabel\tmark\tsentence\na\t1\t\tgood\n"])
def test_a_tsv_file_may_have_no_header_line_and_may_have_one_all_the_same(text, tmp_path):
    (tmp_path / "x.tsv").write_text(text, encoding="utf-8")
    assert fields_of(tmp_path / "x.tsv", header=COLA) == [{"source": "a", "label": "1", "mark": "", "sentence": "good"}]


def test_a_row_that_does_not_fit_the_given_header_is_named(tmp_path):
    (tmp_path / "x.tsv").write_text("a\t1\t\tgood\na\t1\tgood\n", encoding="utf-8")
    with pytest.raises(DataError, match=r"x.tsv, line 2: 3 columns; a row needs 4"):
        fields_of(tmp_path / "x.tsv", header=COLA)


@pytest.mark.parametrize(("name", "text"), [("x.tsv", "a\tb\ta\n1\t2\t3\n"), ("x.csv", "a,b,a\n1,2,3\n")])
def test_a_column_that_is_there_twice_is_refused(name, text, tmp_path):
    (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=rf"{name}, line 1: column 'a' is there twice; rename one"):
        fields_of(tmp_path / name)


def test_columns_without_a_name_may_be_many(tmp_path):
    (tmp_path / "x.csv").write_text("a,,\n1,2,3\n", encoding="utf-8")
    assert fields_of(tmp_path / "x.csv")[0]["a"] == "1"


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
    monkeypatch.setattr(tables, "ROWS_SEEN", 2)
    with pytest.raises(DataError, match=r"a row after 2 does not fit its columns' types \(.*\); write .jsonl"):
        write(tmp_path / "x.parquet", [{"n": 1}, {"n": 2}, {"n": "three"}])
    assert not list(tmp_path.iterdir())


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(DataError, match=r"nowhere/x.csv cannot be written: No such file or directory"):
        write(tmp_path / "nowhere" / "x.csv", WRITTEN)
    with pytest.raises(DataError, match=r"x.txt ends in '.txt'; data files end in .tsv, .csv, .jsonl, .parquet"):
        write(tmp_path / "x.txt", WRITTEN)
