// A canvas to draw on, and what is on it as the data was made: 8 × 8 shares of ink.

const CELLS = 32; // a side, before 4 × 4 of them become a pixel

/** The box of what is drawn in 32 × 32 cells, and how many are inked of each 4 × 4: f32 (64), 0 … 1; null without ink. */
export function picture(canvas) {
  const { width, height } = canvas;
  const ink = canvas.getContext("2d").getImageData(0, 0, width, height).data;
  const isInked = (x, y) => x >= 0 && y >= 0 && x < width && y < height && ink[(y * width + x) * 4 + 3] >= 128;
  let [left, right, top, bottom] = [width, -1, height, -1];
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      if (isInked(x, y)) [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  }
  if (right < 0) return null;
  const side = Math.max(right - left, bottom - top) + 1;
  const [x0, y0] = [(left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2];
  const image = new Float32Array(64);
  for (let row = 0; row < CELLS; row++) {
    for (let column = 0; column < CELLS; column++) {
      const x = Math.floor(x0 + ((column + 0.5) * side) / CELLS);
      const y = Math.floor(y0 + ((row + 0.5) * side) / CELLS);
      if (isInked(x, y)) image[(row >> 2) * 8 + (column >> 2)] += 1 / 16;
    }
  }
  return image;
}

/** Shows a picture in a canvas of 8 × 8, in the color of its text. */
export function showPicture(canvas, image) {
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, 8, 8);
  pen.fillStyle = getComputedStyle(canvas).color;
  image?.forEach((ink, k) => {
    pen.globalAlpha = ink;
    pen.fillRect(k % 8, k >> 3, 1, 1);
  });
}

/** Lets one pointer at a time draw. `onStroke` is told of the end of each stroke. */
export function drawWith(canvas, onStroke) {
  const pen = canvas.getContext("2d", { willReadFrequently: true });
  let last = null; // where the pointer was
  let pointer = null;

  function draw(event) {
    const next = [(event.offsetX * canvas.width) / canvas.clientWidth, (event.offsetY * canvas.height) / canvas.clientHeight];
    Object.assign(pen, { lineWidth: canvas.width / 12, lineCap: "round", strokeStyle: getComputedStyle(canvas).color });
    pen.beginPath();
    pen.moveTo(...(last ?? next));
    pen.lineTo(...next);
    pen.stroke();
    last = next;
  }
  canvas.addEventListener("pointerdown", (event) => {
    if (pointer !== null || event.button !== 0) return;
    pointer = event.pointerId;
    canvas.setPointerCapture(pointer);
    draw(event);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (event.pointerId === pointer) draw(event);
  });
  // Also when the browser takes the pointer away.
  canvas.addEventListener("lostpointercapture", () => {
    pointer = last = null;
    onStroke();
  });
}
