"use strict";
// Everything from the server goes in through textContent: nothing in a text is read as HTML.
const LABELS_SHOWN = 5; // of each model, the most probable
const page = JSON.parse(document.getElementById("page-facts").textContent);
const part = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)}\u00a0%`;
const number = (value) => value.toLocaleString("en");

function cell(content) {
  const made = document.createElement("td");
  made.append(...[content].flat());
  return made;
}

function row(...contents) {
  const made = document.createElement("tr");
  made.append(...contents.map(cell));
  return made;
}

function share(value) {
  const bar = document.createElement("meter");
  bar.value = value;
  bar.ariaHidden = "true";
  return [percent(value), bar];
}

function times(theirs, ours, less, more) {
  return theirs >= ours ? `${(theirs / ours).toFixed(1)} times ${less}` : `${(ours / theirs).toFixed(1)} times ${more}`;
}

async function ask(path, options, failed, button) {
  failed.hidden = true;
  button.disabled = button.ariaBusy = true;
  try {
    const response = await fetch(path, options);
    const found = await response.json();
    if (response.ok) return found;
    failed.textContent = found.error;
  } catch {
    failed.textContent = "The server of this page gave no answer; see whether `compressor ui` still runs.";
  } finally {
    button.disabled = button.ariaBusy = false;
  }
  failed.hidden = false;
  return null;
}

function labelsOf(models) {
  const shown = models.flatMap(({ probabilities }) =>
    Object.entries(probabilities).sort((one, other) => other[1] - one[1]).slice(0, LABELS_SHOWN).map(([label]) => label));
  return Object.keys(models[0].probabilities).filter((label) => shown.includes(label));
}

function showAnswer({ teacher, student }) {
  const models = [teacher, student];
  const rows = [];
  let verdict;
  if ("label" in student) {
    verdict = teacher.label === student.label
      ? `Both say ${student.label}.`
      : `They disagree: the teacher says ${teacher.label}, the student ${student.label}.`;
    rows.push(row("label", ...models.map((found) => found.label)));
    for (const label of labelsOf(models)) {
      rows.push(row(`probability of ${label}`, ...models.map((found) => share(found.probabilities[label]))));
    }
  } else {
    verdict = `The teacher says ${teacher.value.toFixed(2)}, the student ${student.value.toFixed(2)}.`;
    rows.push(row("value", ...models.map((found) => found.value.toFixed(3))));
  }
  verdict += ` The student answered ${times(teacher.latency_ms, student.latency_ms, "faster", "slower")}`;
  rows.push(row("latency, ms", ...models.map((found) => found.latency_ms.toFixed(2))));
  const sizes = page.size_bytes;
  if ("student" in sizes) {
    verdict += ` and is ${times(sizes.teacher, sizes.student, "smaller", "larger")}`;
    rows.push(row("size, MB", ...[sizes.teacher, sizes.student].map((bytes) => (bytes / 1e6).toFixed(1))));
  }
  if (models.some((found) => found.is_truncated)) {
    rows.push(row("read to its end", ...models.map((found) => (found.is_truncated ? "no, too long" : "yes"))));
  }
  part("verdict").textContent = `${verdict}.`;
  part("facts").replaceChildren(...rows);
  part("answer").hidden = false;
}

function showApart(found) {
  const shown = found.examples.length;
  let says = `They disagree on ${number(found.count)} of ${number(found.rows)} validation texts.`;
  if (found.count && "only_first_right" in found) {
    says += ` Only the teacher is right on ${number(found.only_first_right)}, only the student on ${number(found.only_second_right)}`;
    says += ` (McNemar p = ${found.p_value.toPrecision(2)}).`;
  }
  if (shown < found.count) says += ` These are the ${number(shown)} that both are surest of, or furthest apart on.`;
  part("apart-says").textContent = says;
  part("examples").replaceChildren(...found.examples.map((item) => row(item.text, item.label, item.teacher, item.int8)));
  part("examples").closest(".table").hidden = !shown;
  part("apart").hidden = false;
}

part("ask").addEventListener("submit", async (event) => {
  event.preventDefault();
  const texts = [...event.target.querySelectorAll("textarea")].map((area) => area.value);
  const options = {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify({ texts }),
  };
  part("answer").hidden = true;
  const found = await ask("classify", options, part("ask-error"), event.target.querySelector("button"));
  if (found) showAnswer(found);
});

part("look")?.addEventListener("click", async (event) => {
  const found = await ask("disagreements", {}, part("look-error"), event.target);
  if (found) showApart(found);
});
