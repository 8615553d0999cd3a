import { $, explain, say, start } from "../demo.js";

const about = await (await fetch("about.json")).json();

/** Text to numbers and back: by a tokenizer's file, or by the alphabet of a model of characters. */
async function makeTokenizer() {
  if (about.alphabet) {
    const numbers = new Map([...about.alphabet].map((letter, k) => [letter, k]));
    const letters = [...about.alphabet];
    return {
      encode: (text) => [...text].filter((letter) => numbers.has(letter)).map((letter) => numbers.get(letter)),
      decode: (ids) => ids.map((id) => letters[id]).join(""),
    };
  }
  const { Tokenizer } = await import("./tokenizers.js");
  const read = async (name) => (await fetch(name)).json();
  const made = new Tokenizer(await read("tokenizer.json"), await read("tokenizer_config.json"));
  return { encode: (text) => made.encode(text).ids, decode: (ids) => made.decode(ids, { skip_special_tokens: true }) };
}

const [tokenizer, model] = await Promise.all([makeTokenizer(), start(new URL("bundle/", location.href))]);
let isStopped = true;

async function write() {
  isStopped = false;
  $("#go").disabled = true;
  $("#stop").disabled = false;
  const prompt = $("#prompt").value;
  const given = tokenizer.encode(prompt).slice(-about.prompt);
  if (!given.length) throw new Error("There is nothing to begin with: write a word or two.");
  const start = document.createElement("span");
  start.className = "given";
  start.textContent = tokenizer.decode(given);
  const rest = document.createElement("span");
  $("#text").replaceChildren(start, rest);
  const how = { temperature: Number($("#temperature").value), top: Number($("#top").value) };
  await model.resetState(); // the cache, which also counts what is in it
  const begun = performance.now();
  const prompted = { ids: [given], position: given.map((_, k) => k), ...how };
  let { token, position } = await model.run(given.length > 1 ? "prefill" : "decode", prompted);
  const written = [];
  for (let left = about.length - given.length; left > 0 && !isStopped; left--) {
    // The next token is begun before this one is read: its number never has to come here first.
    const read = token.read({ keep: true });
    const next = left > 1 ? await model.run("decode", { ids: token, position, ...how }) : null;
    const id = Number((await read)[0]);
    token.dispose();
    if (about.end.includes(id)) break;
    written.push(id);
    rest.textContent = tokenizer.decode(written);
    say(`${written.length} tokens, ${((1000 * written.length) / (performance.now() - begun)).toFixed(0)} a second`);
    if (written.length % 16 === 0) await new Promise((resolve) => setTimeout(resolve));
    if (next) {
      position.dispose();
      ({ token, position } = next);
    }
  }
}

async function run() {
  try {
    await write();
  } catch (error) {
    explain(error);
  }
  isStopped = true;
  $("#go").disabled = false;
  $("#stop").disabled = true;
  document.body.dataset.written = "true";
}

$("#prompt").value = about.begin;
$("#go").onclick = run;
$("#stop").onclick = () => (isStopped = true);
$("#temperature").oninput = () => ($("#warmth").textContent = $("#temperature").value);
$("#top").oninput = () => ($("#among").textContent = $("#top").value);
for (const element of document.querySelectorAll("textarea, #go")) element.disabled = false;
