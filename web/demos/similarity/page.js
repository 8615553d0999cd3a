import { Tokenizer } from "./tokenizers.js";
import { $, fetchedJson, ready, say, start } from "../demo.js";

const LONGEST = 128; // tokens

const list = await fetchedJson("sentences.json");
show(list.map((sentence) => [sentence, null])); // to read while the model is loaded
const [tokenizer, model] = await Promise.all([
  Promise.all([fetchedJson("tokenizer.json"), fetchedJson("tokenizer_config.json")]).then((parts) => new Tokenizer(...parts)),
  start(),
]);

/** A sentence as a vector of length 1. */
async function embed(text) {
  const { ids } = tokenizer.encode(text);
  const cut = ids.length > LONGEST ? [...ids.slice(0, LONGEST - 1), ids.at(-1)] : ids;
  const { output } = await model.run("forward", { input_ids: [cut], attention_mask: [cut.map(() => 1)] });
  return output.read();
}

const dot = (a, b) => a.reduce((sum, x, k) => sum + x * b[k], 0);

/** The list, with how close each is: -1 … 1, or null. */
function show(rows) {
  $("#sentences").replaceChildren(...rows.map(([sentence, score]) => {
    const item = document.createElement("li");
    item.append(sentence);
    if (score === null) return item;
    const number = document.createElement("data");
    number.value = String(score);
    number.textContent = score.toFixed(2).replace("-", "−");
    const track = document.createElement("div");
    track.className = "track";
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.style.width = `${Math.max(0, score * 100)}%`;
    track.append(bar);
    item.append(number, track);
    return item;
  }));
}

say("Reading the list …");
const vectors = new Map(await Promise.all(list.map(async (text) => [text, await embed(text)])));

async function compareNow() {
  const text = $("#query").value.trim();
  if (!text) {
    show([...vectors.keys()].map((sentence) => [sentence, null]));
    say("Type a sentence to compare.");
    return;
  }
  const begun = performance.now();
  const query = await embed(text);
  const rows = [...vectors].map(([sentence, vector]) => [sentence, dot(vector, query)]);
  rows.sort((a, b) => b[1] - a[1]);
  show(rows);
  say(`Closest: “${rows[0][0]}” (${(performance.now() - begun).toFixed(0)} ms)`);
}

let isComparing = false;
let isWanted = false;

/** Until the comparison ends, the numbers in the list are of an older sentence: they are dimmed. */
function setComparing(wanted) {
  isComparing = wanted;
  $("#sentences").setAttribute("aria-busy", String(wanted));
  if (wanted) say("Comparing …");
}

/** Compares what was typed last. One comparison runs at a time: what is typed meanwhile waits, and only the last of it is compared. */
async function compare() {
  isWanted = true;
  if (isComparing) return;
  setComparing(true);
  try {
    while (isWanted) {
      isWanted = false;
      await compareNow();
    }
  } finally {
    setComparing(false);
  }
}

$("#query").addEventListener("input", compare);
$("#add").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("#new").value.trim();
  if (!text) return;
  $("#new").value = "";
  vectors.set(text, await embed(text));
  await compare();
});
ready();
await compare();
