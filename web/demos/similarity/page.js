import { Tokenizer } from "./tokenizers.js";
import { $, explain, say, start } from "../demo.js";

const LONGEST = 128; // tokens
const list = await (await fetch("sentences.json")).json();
const read = async (name) => (await fetch(name)).json();
const [tokenizer, model] = await Promise.all([
  Promise.all([read("tokenizer.json"), read("tokenizer_config.json")]).then((parts) => new Tokenizer(...parts)),
  start(new URL("bundle/", location.href)),
]);

/** A sentence as a vector of length 1. */
async function embed(text) {
  const { ids } = tokenizer.encode(text);
  const cut = ids.length > LONGEST ? [...ids.slice(0, LONGEST - 1), ids.at(-1)] : ids;
  const { output } = await model.run("forward", { input_ids: [cut], attention_mask: [cut.map(() => 1)] });
  return output.read();
}

const vectors = new Map();
for (const text of list) vectors.set(text, await embed(text));

let latest = 0;
/** Sorts the list by what was typed last; an answer that comes too late is dropped. */
async function compare() {
  const mine = ++latest;
  const text = $("#query").value.trim();
  if (!text) return;
  const begun = performance.now();
  const query = await embed(text);
  if (mine !== latest) return;
  const rows = [...vectors].map(([sentence, vector]) => [sentence, vector.reduce((sum, x, k) => sum + x * query[k], 0)]);
  rows.sort((a, b) => b[1] - a[1]);
  $("#sentences").replaceChildren(...rows.map(([sentence, score]) => {
    const item = document.createElement("li");
    const number = document.createElement("output");
    number.textContent = score.toFixed(2);
    number.dataset.score = String(score);
    const track = document.createElement("div");
    track.className = "track";
    const bar = document.createElement("div");
    bar.className = "bar";
    bar.style.width = `${Math.max(0, score * 100)}%`;
    track.append(bar);
    item.append(sentence, number, track);
    return item;
  }));
  say(`Compared in ${(performance.now() - begun).toFixed(0)} ms`);
}

let timer;
$("#query").addEventListener("input", () => {
  clearTimeout(timer);
  timer = setTimeout(() => compare().catch(explain), 60);
});
$("#add").addEventListener("submit", async (event) => {
  event.preventDefault();
  const text = $("#new").value.trim();
  if (!text) return;
  vectors.set(text, await embed(text));
  $("#new").value = "";
  await compare();
});
for (const element of document.querySelectorAll("input, button")) element.disabled = false;
await compare();
