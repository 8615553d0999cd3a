import { $, fetched, ready, say, start } from "../demo.js";
import { drawCurves } from "./curve.js";
import { Pad, picture, showPicture } from "./pad.js";

const BATCH = 64;
const HELD = 360; // of the end: never trained on
const data = new Uint8Array(await (await fetched("digits.bin")).arrayBuffer());
const COUNT = data.length / 65;
const pixels = Float32Array.from(data.subarray(0, COUNT * 64), (value) => value / 16);
const labels = data.subarray(COUNT * 64);
const imageAt = (k) => pixels.subarray(k * 64, k * 64 + 64);

const model = await start();

async function predict(images) {
  const { output } = await model.run("predict", { images });
  return output.read();
}

/** The digit with the highest odds in a row. */
const best = (odds, row) => odds.subarray(row * 10, row * 10 + 10).reduce((at, x, k, all) => (x > all[at] ? k : at), 0);

// ---- training

const losses = [];
const shares = []; // pairs of a step and the share of held-out pictures that is read correctly then
let order = [];
let isTraining = false;
let training = Promise.resolve(); // ends after the steps that were begun

/** The next batch, in an order that is drawn for each pass over the data. */
function batch() {
  if (order.length < BATCH) {
    order = Array.from({ length: COUNT - HELD }, (_, k) => k);
    for (let k = order.length - 1; k > 0; k--) {
      const other = Math.floor(Math.random() * (k + 1));
      [order[k], order[other]] = [order[other], order[k]];
    }
  }
  const chosen = order.splice(0, BATCH);
  const images = new Float32Array(BATCH * 64);
  chosen.forEach((at, k) => images.set(imageAt(at), k * 64));
  return { images, labels: Int32Array.from(chosen, (at) => labels[at]) };
}

function showTraining() {
  $("#steps").textContent = String(losses.length);
  $("#loss").textContent = losses.length ? losses.at(-1).toFixed(3) : "–";
  drawCurves($("#curve"), losses, shares);
}

async function measure() {
  const odds = await predict(pixels.subarray((COUNT - HELD) * 64));
  let right = 0;
  for (let k = 0; k < HELD; k++) right += best(odds, k) === labels[COUNT - HELD + k];
  shares.push([losses.length, right / HELD]);
  $("#accuracy").textContent = `${((100 * right) / HELD).toFixed(1)} %`;
  $("#accuracy").dataset.value = String(right / HELD);
  showTraining();
  await read();
}

async function takeSteps() {
  try {
    while (isTraining) {
      // The losses of ten steps are read while the next ones run.
      const results = [];
      for (let k = 0; k < 10; k++) results.push((await model.run("train_step", batch())).loss.item());
      losses.push(...(await Promise.all(results)));
      showTraining();
      if (losses.length % 50 === 0) {
        await measure();
        await model.checkpoint();
      }
      await new Promise((resolve) => setTimeout(resolve)); // clicks come through
    }
    await measure();
  } finally {
    setTraining(false);
  }
}

function setTraining(wanted) {
  isTraining = wanted;
  $("#train").textContent = wanted ? "Pause" : "Train";
}

async function pause() {
  setTraining(false);
  await training.catch(() => {}); // said where it happened
}

function toggle() {
  if (isTraining) return pause();
  setTraining(true);
  return (training = training.catch(() => {}).then(takeSteps));
}

async function reset() {
  await pause();
  await model.resetState();
  losses.length = shares.length = 0;
  $("#accuracy").textContent = "–";
  delete $("#accuracy").dataset.value;
  showTraining();
  await read();
  say("It knows nothing again.");
}

// ---- weights

async function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await model.save()]));
  link.download = "digits.safetensors";
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000);
  say("Saved as digits.safetensors, which PyTorch can load.");
}

async function loadFile() {
  const [file] = $("#file").files;
  if (!file) return;
  const bytes = new Uint8Array(await file.arrayBuffer());
  $("#file").value = ""; // the same one may be chosen again
  await pause();
  model.loadState(bytes);
  await measure();
  say(`It knows what was saved in ${file.name}.`);
}

// ---- reading

let current = null; // what is on the pad
let reading = 0;

function showOdds(odds) {
  const top = odds && best(odds, 0);
  $("#answer").textContent = odds ? String(top) : "";
  $("#odds").replaceChildren(...Array.from({ length: 10 }, (_, digit) => {
    const bar = document.createElement("div");
    bar.dataset.digit = String(digit);
    bar.style.height = `${odds ? 100 * odds[digit] : 0}%`;
    if (digit === top) bar.className = "best";
    return bar;
  }));
}

/** Shows what the network reads in what is on the pad now. */
async function read() {
  const mine = ++reading;
  const odds = current && (await predict(current));
  if (mine === reading) showOdds(odds);
}

/** Takes what was drawn, a picture of the data, or nothing. */
async function take(image) {
  current = image;
  showPicture($("#seen"), image);
  await read();
}

const pad = new Pad($("#pad"), () => take(picture(pad.strokes)));
$("#clear").onclick = () => {
  pad.wipe();
  say("");
  return take(null);
};
$("#example").onclick = () => {
  pad.wipe();
  const at = COUNT - HELD + Math.floor(Math.random() * HELD);
  say(`One of the pictures that it has not seen: a person wrote a ${labels[at]}.`);
  return take(imageAt(at));
};
$("#train").onclick = toggle;
$("#reset").onclick = reset;
$("#save").onclick = save;
$("#load").onclick = () => $("#file").click();
$("#file").onchange = loadFile;
addEventListener("resize", showTraining);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  pad.show();
  showPicture($("#seen"), current);
});
showTraining();
showOdds(null);
ready();
