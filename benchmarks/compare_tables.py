"""The result of `compare` as tables for people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks import baseline, report
from benchmarks.local import THROUGHPUT, THROUGHPUT_BATCH
from benchmarks.ratios import name_of, standing_of
from benchmarks.report import Table, number, percentiles


def tables(result: Mapping[str, Any]) -> list[Table]:
    """Every figure of a comparison."""
    return list(by_name(result).values())


def by_name(result: Mapping[str, Any]) -> dict[str, Table]:
    """The tables by what they show."""
    found = {
        "targets": targets(result),
        "quality": quality(result),
        "in_process": in_process(result),
        "text_to_label": text_to_label(result),
        "closed_loop": closed_loop(result),
        "open_loop": open_loop(result),
        "costs": costs(result),
        "ratios": ratios(result["ratios"]),
    }
    if result["time_split_ms"]:
        found["time_split"] = time_split(result["time_split_ms"])
    if "baseline" in result:
        found["baseline"] = baseline.table(result["baseline"])
    if result["calibration"] is not None:
        found["calibration"] = calibration(result["calibration"])
    return found | {"disagreements": disagreements(result)}


def time_split(split: Mapping[str, Mapping[str, float]]) -> Table:
    """Where the time of one request goes."""
    rows = [
        [name, *(f"{number(spent)} ({100 * spent / sum(parts.values()):.0f} %)" for spent in parts.values())]
        for name, parts in split.items()
    ]
    header = ["model", *(named(part) for part in next(iter(split.values())))]
    return Table("Where the time of a mean request of one client goes, by the server's own counters, ms", header, rows)


def quality(result: Mapping[str, Any]) -> Table:
    """Metric on the test rows, and size."""
    rows = []
    texts = {name: facts for name, facts in result["text_to_label"].items() if name not in result["in_process"]}
    for name, facts in (result["in_process"] | texts).items():
        if facts["test"] is not None:
            rows.append([named(name), *_quality(facts["test"]), number(facts["size_bytes"] / 1e6, 1)])
        else:
            rows.append([named(name), *[report.MISSING] * 5, number(facts["size_bytes"] / 1e6, 1)])
    for name, facts in result["served"].items():
        if facts["test"] is not None:
            rows.append([f"{name} served", *_quality(facts["test"]), report.MISSING])
    metric = f"test {result['metric']} x 100"
    header = ["system", metric, "95 % interval", "rows", "agrees with teacher %", "McNemar p", "MB"]
    return Table("Quality on the test rows, and size of the weights", header, rows)


def _quality(test: Mapping[str, Any]) -> list[str]:
    low, high = test["interval_95"]
    against = test["against_teacher"]
    return [
        number(100 * test["score"]),
        f"{100 * low:.2f} to {100 * high:.2f}",
        str(test["rows"]),
        number(100 * against["agreement"]) if against else report.MISSING,
        f"{against['p_value']:.3g}" if against and "p_value" in against else report.MISSING,
    ]


def in_process(result: Mapping[str, Any]) -> Table:
    """Latency by shape, and throughput."""
    systems = result["in_process"]
    shapes = list(next(iter(systems.values()))["latency"])
    rows = [
        [named(name), *(percentiles(facts["latency"][shape]) for shape in shapes), number(facts[THROUGHPUT], 1)]
        for name, facts in systems.items()
    ]
    rows.append(["tokenizer alone", percentiles(result["tokenizer"]), *("" for _ in shapes)])
    overhead = result["overhead"]
    client = overhead["served_client_share"]
    title = (
        "In process, token ids in, p50 / p95 / p99 in ms "
        f"(an empty call takes {1000 * overhead['empty_call_p50_ms']:.1f} us, {100 * overhead['share']:.2g} % of the "
        f"fastest{'' if client is None else f'; client and network take {100 * client:.0f} % of a served request'})"
    )
    header = ["system", *(named(shape) for shape in shapes), f"texts/s, batches of {THROUGHPUT_BATCH}"]
    return Table(title, header, rows)


def p50_in_process(result: Mapping[str, Any]) -> Table:
    """The same with the p50 alone, for a page."""
    full, systems = in_process(result), result["in_process"]
    rows = [
        [named(name), *(number(times["p50_ms"]) for times in facts["latency"].values()), number(facts[THROUGHPUT], 0)]
        for name, facts in systems.items()
    ]
    rows.append(["tokenizer alone", number(result["tokenizer"]["p50_ms"])])
    return Table(full.title.replace("p50 / p95 / p99", "p50"), full.header, rows)


def text_to_label(result: Mapping[str, Any]) -> Table:
    """Latency and throughput with the tokenizer."""
    rows = [
        [named(name), percentiles(facts["latency"]), number(facts[THROUGHPUT], 1)]
        for name, facts in result["text_to_label"].items()
    ]
    header = ["system", "one text, p50 / p95 / p99 ms", f"texts/s, batches of {THROUGHPUT_BATCH}"]
    return Table("In process, text in, label out", header, rows)


def costs(result: Mapping[str, Any]) -> Table:
    """Start, memory, processor time and price."""
    rows = []
    spent = result["processor_time"]
    for name in dict.fromkeys([*result["start"], *spent]):
        start = result["start"].get(name)
        by_batch = list(spent[name].values()) if name in spent else [None, None]
        rows.append(
            [
                named(name),
                number(start and start["first_answer_s"]),
                number(start and start["uss_bytes"] / 1e6, 0),
                *(number(found and found["cpu_s_per_1000_texts"]) for found in by_batch),
                *(number(found and found["price_per_million_texts"], 4) for found in by_batch),
            ]
        )
    server = result["server"]
    if server["ready_s"] is not None:
        rows.append(
            ["the server, all models", number(server["ready_s"]), number(server["uss_bytes"] / 1e6, 0), *[""] * 4]
        )
    title = (
        "Start, memory; processor time of the graph alone, and the price of that for a million texts at "
        f"{result['price_per_core_hour']:g} per core-hour"
    )
    batches = ("one at a time", f"batches of {THROUGHPUT_BATCH}")
    header = [
        "system",
        "first answer after s",
        "memory MB",
        *(f"processor s / 1,000 texts, {each}" for each in batches),
    ]
    return Table(title, [*header, *(f"price, {each}" for each in batches)], rows)


def closed_loop(result: Mapping[str, Any]) -> Table:
    """Served, each client waiting for its answer."""
    rows = [
        [
            f"{name} ({facts['instances']} x {facts['threads_of_each']})",
            str(row["concurrency"]),
            percentiles(row),
            number(row["requests_per_s"], 1),
            number(row["server_cpu_s_per_1000_texts"]),
            number(row["client_cpu_s_per_1000_texts"]),
            number(row["price_per_million_texts"], 4),
            str(row["failures"]),
        ]
        for name, facts in result["served"].items()
        for row in facts["load"]
    ]
    header = [
        "model (instances x threads)",
        "clients",
        "p50 / p95 / p99 ms",
        "requests/s",
        "server's processor s / 1,000 texts",
        "the clients'",
        "price of a million",
        "failures",
    ]
    return Table("Served, gRPC, closed loop", header, rows)


def open_loop(result: Mapping[str, Any]) -> Table:
    """Served, requests coming at a fixed rate."""
    rows = [
        [
            name,
            number(row["rate_per_s"], 0),
            percentiles(row),
            number(row["answered_per_s"], 1),
            number(row["sent_late_p99_ms"]),
            str(row["failures"]),
        ]
        for name, facts in result["served"].items()
        for row in facts["open_loop"]
    ]
    header = ["model", "arrivals/s", "p50 / p95 / p99 ms", "answered/s", "sent late, p99 ms", "failures"]
    return Table("Served, gRPC, open loop: from the planned moment to the answer", header, rows)


def ratios(rows: Sequence[Mapping[str, Any]]) -> Table:
    """How many times better each is than the other, and where the other is better."""
    found = []
    for row in rows:
        figure, where, system, than = name_of(row)
        interval = row["interval_95"]
        digits = 3 if figure == "accuracy" else 2
        found.append(
            [
                f"{figure}, {named(where)}",
                f"{named(system)} / {named(than)}",
                number(row["ratio"], digits),
                f"{interval[0]:.{digits}f} to {interval[1]:.{digits}f}" if interval else report.MISSING,
                standing_of(row).value,
            ]
        )
    return Table("How many times better", ["figure", "systems", "times", "95 % interval", ""], found)


def calibration(found: Mapping[str, Any]) -> Table:
    """Confidence against right answers."""
    rows = [
        [named(name), *(f"{100 * facts[what]:.2f}" for what in ("ece", "ece_by_chance", "overconfidence"))]
        for name, facts in found["systems"].items()
    ]
    title = f"Calibration on {found['rows']} test rows: confidence against share of right answers, points"
    return Table(title, ["system", "expected calibration error", "by chance alone", "surer than right by"], rows)


def disagreements(result: Mapping[str, Any]) -> Table:
    """Texts that teacher and student answer differently."""
    found = result["disagreements"]
    title = f"Teacher and INT8 student disagree on {found['count']} of {found['rows']} test texts; the surest of them"
    rows = [[row["text"], row["label"], row["teacher"], row["int8"]] for row in found["examples"]]
    return Table(title, ["text", "label", "teacher", "student INT8"], rows)


def targets(result: Mapping[str, Any]) -> Table:
    """What had to be reached."""
    rows = [
        [row["target"], f"{row['value']:.3g}", f"{row['rule']} {row['bound']:g}", "met" if row["is_met"] else "MISSED"]
        for row in result["targets"]
    ]
    return Table("Targets", ["target", "measured", "bound", ""], rows)


def named(name: str) -> str:
    """A key as words."""
    return name.replace("_", " ")
