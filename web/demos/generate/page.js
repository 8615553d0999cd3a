import { $, fetchedJson, ready, say, start } from "../demo.js";
import { textGeneration } from "../torch-webgpu-text.js";

const { about, begin } = await fetchedJson("about.json");
$("#about").textContent = about;
const writer = await start(textGeneration);
let stopping = null;

async function write(prompt, signal) {
  const [given, rest] = ["given", ""].map((className) => Object.assign(document.createElement("span"), { className }));
  given.textContent = prompt;
  $("#text").replaceChildren(given, rest);
  let begun = 0;
  const onToken = (count) => {
    begun ||= performance.now(); // the prompt is not counted
    const perSecond = (1000 * (count - 1)) / (performance.now() - begun);
    say(`${count} pieces${count > 1 ? `, ${perSecond.toFixed(0)} a second` : ""}`);
  };
  const how = { temperature: Number($("#temperature").value), topK: Number($("#top").value), signal, onToken };
  for await (const piece of writer.generate(prompt, how)) rest.textContent += piece;
}

function setWriting(isWriting) {
  const hadFocus = [$("#go"), $("#stop")].includes(document.activeElement);
  $("#go").disabled = isWriting;
  $("#stop").disabled = !isWriting;
  if (hadFocus) $(isWriting ? "#stop" : "#go").focus();
  $("#text").setAttribute("aria-busy", String(isWriting)); // read out when it is whole
}

async function run() {
  stopping = new AbortController();
  setWriting(true);
  try {
    await write($("#prompt").value, stopping.signal);
  } catch (error) {
    if (error.name === "InputError") {
      say(`${error.message}.`);
      $("#prompt").focus();
    } else if (!stopping.signal.aborted) throw error;
  } finally {
    setWriting(false);
  }
}

$("#prompt").value = begin;
$("#go").onclick = run;
$("#stop").onclick = () => stopping.abort();
$("#temperature").oninput = () => ($("#warmth").textContent = $("#temperature").value);
$("#top").oninput = () => ($("#among").textContent = $("#top").value);
ready();
