import { $, explain, say, start } from "../demo.js";

const BATCH = 64;
const data = new Uint8Array(await (await fetch("digits.bin")).arrayBuffer());
const COUNT = data.length / 65;
const HELD = 360; // of the end: never trained on
const pixels = Float32Array.from(data.subarray(0, COUNT * 64), (value) => value / 16);
const labels = data.subarray(COUNT * 64);

const model = await start(new URL("bundle/", location.href));
const losses = [];
let isTraining = false;
let order = [];

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
  chosen.forEach((at, k) => images.set(pixels.subarray(at * 64, at * 64 + 64), k * 64));
  return { images, labels: Int32Array.from(chosen, (at) => labels[at]) };
}

async function predict(images) {
  const { output } = await model.run("predict", { images });
  return output.read();
}

const best = (odds, row) => odds.subarray(row * 10, row * 10 + 10).reduce((at, x, k, all) => (x > all[at] ? k : at), 0);

async function measure() {
  const odds = await predict(pixels.subarray((COUNT - HELD) * 64));
  let right = 0;
  for (let k = 0; k < HELD; k++) right += best(odds, k) === labels[COUNT - HELD + k];
  $("#accuracy").textContent = `${((100 * right) / HELD).toFixed(1)} %`;
  $("#accuracy").dataset.value = String(right / HELD);
}

function drawCurve() {
  const canvas = $("#curve");
  const ratio = devicePixelRatio;
  const [width, height] = [canvas.clientWidth * ratio, canvas.clientHeight * ratio];
  if (canvas.width !== width) [canvas.width, canvas.height] = [width, height];
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, width, height);
  if (losses.length < 2) return;
  const top = Math.max(2.5, ...losses);
  pen.strokeStyle = getComputedStyle($("#train")).backgroundColor;
  pen.lineWidth = 2 * ratio;
  pen.lineJoin = "round";
  pen.beginPath();
  losses.forEach((loss, k) => {
    const x = (k / (losses.length - 1)) * (width - 8 * ratio) + 4 * ratio;
    pen.lineTo(x, height - 6 * ratio - (loss / top) * (height - 12 * ratio));
  });
  pen.stroke();
}

async function train() {
  isTraining = !isTraining;
  $("#train").textContent = isTraining ? "Pause" : "Train";
  while (isTraining) {
    // The losses of ten steps are read while the next ones run.
    const results = [];
    for (let k = 0; k < 10; k++) results.push((await model.run("train_step", batch())).loss.item());
    losses.push(...(await Promise.all(results)));
    $("#steps").textContent = String(losses.length);
    $("#loss").textContent = losses.at(-1).toFixed(3);
    drawCurve();
    if (losses.length % 50 === 0) {
      await measure();
      await model.checkpoint();
      await read();
    }
    await new Promise((resolve) => setTimeout(resolve));
  }
  await measure();
  await read();
}

async function reset() {
  isTraining = false;
  $("#train").textContent = "Train";
  await model.resetState();
  losses.length = 0;
  for (const name of ["#loss", "#accuracy"]) $(name).textContent = "–";
  $("#steps").textContent = "0";
  drawCurve();
  await read();
}

async function save() {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([await model.save()]));
  link.download = "digits.safetensors";
  link.click();
  URL.revokeObjectURL(link.href);
}

async function loadFile() {
  const [file] = $("#file").files;
  if (!file) return;
  model.loadState(new Uint8Array(await file.arrayBuffer()));
  await measure();
  await read();
  say(`Took the weights in ${file.name}`);
}

// ---- drawing

const pad = $("#pad");
const pen = pad.getContext("2d", { willReadFrequently: true });
let isEmpty = true;

function clear() {
  pen.clearRect(0, 0, pad.width, pad.height);
  isEmpty = true;
  $("#answer").textContent = "";
  showOdds(new Float32Array(10));
}

/** The drawing as the data was made: its box in 32 × 32 cells, and how many are inked of each 4 × 4. */
function picture() {
  const { width, height } = pad;
  const ink = pen.getImageData(0, 0, width, height).data;
  let [left, right, top, bottom] = [width, -1, height, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (ink[(y * width + x) * 4 + 3] < 128) continue;
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  }
  const side = Math.max(right - left, bottom - top, 1) + 1;
  const [x0, y0] = [(left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2];
  const image = new Float32Array(64);
  for (let row = 0; row < 32; row++) {
    for (let column = 0; column < 32; column++) {
      const x = Math.floor(x0 + ((column + 0.5) * side) / 32);
      const y = Math.floor(y0 + ((row + 0.5) * side) / 32);
      const isInked = x >= 0 && y >= 0 && x < width && y < height && ink[(y * width + x) * 4 + 3] >= 128;
      if (isInked) image[(row >> 2) * 8 + (column >> 2)] += 1 / 16;
    }
  }
  return image;
}

function showOdds(odds) {
  const top = best(odds, 0);
  $("#odds").replaceChildren(...Array.from({ length: 10 }, (_, digit) => {
    const bar = document.createElement("div");
    bar.dataset.digit = String(digit);
    bar.style.height = `${100 * odds[digit]}%`;
    if (odds[digit] && digit === top) bar.className = "best";
    return bar;
  }));
}

async function read() {
  if (isEmpty) return;
  const odds = await predict(picture());
  showOdds(odds);
  $("#answer").textContent = String(best(odds, 0));
}

let last = null;
const place = ({ offsetX, offsetY }) => [(offsetX * pad.width) / pad.clientWidth, (offsetY * pad.height) / pad.clientHeight];
pad.addEventListener("pointerdown", (event) => {
  pad.setPointerCapture(event.pointerId);
  last = place(event);
});
pad.addEventListener("pointermove", (event) => {
  if (!last) return;
  const next = place(event);
  Object.assign(pen, { lineWidth: 26, lineCap: "round", strokeStyle: getComputedStyle(document.body).color });
  pen.beginPath();
  pen.moveTo(...last);
  pen.lineTo(...next);
  pen.stroke();
  last = next;
  isEmpty = false;
});
pad.addEventListener("pointerup", () => {
  last = null;
  read().catch(explain);
});

$("#train").onclick = () => train().catch(explain);
$("#reset").onclick = () => reset().catch(explain);
$("#save").onclick = () => save().catch(explain);
$("#clear").onclick = clear;
$("#file").onchange = () => loadFile().catch(explain);
for (const element of document.querySelectorAll("input, button")) element.disabled = false;
clear();
