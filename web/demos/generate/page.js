import { $, fetchedJson, ready, say, start } from "../demo.js";

const about = await fetchedJson("about.json");

/** Text to numbers and back: by a tokenizer's file, or by the alphabet of a model of characters. */
async function makeTokenizer() {
  if (about.alphabet) {
    const letters = [...about.alphabet];
    const numbers = new Map(letters.map((letter, k) => [letter, k]));
    return {
      encode: (text) => [...text].filter((letter) => numbers.has(letter)).map((letter) => numbers.get(letter)),
      decode: (ids) => ids.map((id) => letters[id]).join(""),
    };
  }
  const { Tokenizer } = await import("./tokenizers.js");
  const made = new Tokenizer(await fetchedJson("tokenizer.json"), await fetchedJson("tokenizer_config.json"));
  return { encode: (text) => made.encode(text).ids, decode: (ids) => made.decode(ids, { skip_special_tokens: true }) };
}

const [tokenizer, model] = await Promise.all([makeTokenizer(), start()]);
let isStopped = true;

async function write(given) {
  const prompt = document.createElement("span");
  prompt.className = "given";
  prompt.textContent = tokenizer.decode(given);
  const rest = document.createElement("span");
  $("#text").replaceChildren(prompt, rest);
  const how = { temperature: Number($("#temperature").value), top: Number($("#top").value) };
  await model.resetState(); // the cache, which also counts what is in it
  const prompted = { ids: [given], position: given.map((_, k) => k), ...how };
  let { token, position } = await model.run(given.length > 1 ? "prefill" : "decode", prompted);
  const written = [];
  let begun = 0;
  for (let left = about.length - given.length; left > 0 && !isStopped; left--) {
    // The next token is begun before this one is read: its number never has to come here first.
    const read = token.read({ keep: true });
    const next = left > 1 ? await model.run("decode", { ids: token, position, ...how }) : null;
    const id = Number((await read)[0]);
    begun ||= performance.now(); // the prompt is not counted
    if (about.end.includes(id)) break;
    written.push(id);
    rest.textContent = tokenizer.decode(written);
    const perSecond = (1000 * (written.length - 1)) / (performance.now() - begun);
    say(`${written.length} tokens${written.length > 1 ? `, ${perSecond.toFixed(0)} a second` : ""}`);
    if (written.length % 16 === 0) await new Promise((resolve) => setTimeout(resolve)); // clicks come through
    token.dispose();
    position.dispose();
    if (next) ({ token, position } = next);
  }
}

function setWriting(isWriting) {
  isStopped = !isWriting;
  const hadFocus = [$("#go"), $("#stop")].includes(document.activeElement);
  $("#go").disabled = isWriting;
  $("#stop").disabled = !isWriting;
  if (hadFocus) $(isWriting ? "#stop" : "#go").focus();
  $("#text").setAttribute("aria-busy", String(isWriting)); // read out when it is whole
}

async function run() {
  const given = tokenizer.encode($("#prompt").value).slice(-about.prompt);
  if (!given.length) {
    say("There is nothing to begin with: write a word or two.");
    $("#prompt").focus();
    return;
  }
  setWriting(true);
  try {
    await write(given);
  } finally {
    setWriting(false);
  }
}

$("#prompt").value = about.begin;
$("#go").onclick = run;
$("#stop").onclick = () => (isStopped = true);
$("#temperature").oninput = () => ($("#warmth").textContent = $("#temperature").value);
$("#top").oninput = () => ($("#among").textContent = $("#top").value);
ready();
