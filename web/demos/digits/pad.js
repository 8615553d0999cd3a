// A canvas to draw on, and what is drawn as the data was made: 8 × 8 shares of ink.

const CELLS = 32; // a side of a picture, before 4 × 4 of them become a pixel
const STROKE = 6; // cells: as thick as in the data, however large or small it was drawn

/** Draws strokes, lists of [x, y], in the units that the pen has. */
function ink(pen, strokes) {
  pen.lineCap = pen.lineJoin = "round";
  for (const [first, ...others] of strokes) {
    pen.beginPath();
    pen.moveTo(...first);
    for (const place of others.length ? others : [first]) pen.lineTo(...place);
    pen.stroke();
  }
}

/** The smallest square around the strokes as f32 (64), 0 … 1; null without strokes. */
export function picture(strokes) {
  if (!strokes.length) return null;
  const [xs, ys] = [0, 1].map((axis) => strokes.flat().map((place) => place[axis]));
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const scale = (CELLS - STROKE) / Math.max(right - left, bottom - top, 1);
  const pen = new OffscreenCanvas(CELLS, CELLS).getContext("2d");
  pen.translate(CELLS / 2, CELLS / 2);
  pen.scale(scale, scale);
  pen.translate(-(left + right) / 2, -(top + bottom) / 2);
  pen.lineWidth = STROKE / scale;
  ink(pen, strokes);
  const { data } = pen.getImageData(0, 0, CELLS, CELLS);
  const image = new Float32Array(64);
  for (let cell = 0; cell < CELLS * CELLS; cell++) {
    const [row, column] = [Math.floor(cell / CELLS), cell % CELLS];
    image[(row >> 2) * 8 + (column >> 2)] += data[4 * cell + 3] / 255 / 16;
  }
  return image;
}

/** Shows a picture in a canvas of 8 × 8, in the color of its text; null: nothing. */
export function showPicture(canvas, image) {
  const pen = canvas.getContext("2d");
  pen.clearRect(0, 0, 8, 8);
  pen.fillStyle = getComputedStyle(canvas).color;
  image?.forEach((share, k) => {
    pen.globalAlpha = share;
    pen.fillRect(k % 8, k >> 3, 1, 1);
  });
}

/** A canvas on which one pointer at a time draws. */
export class Pad {
  #canvas;
  #pointer = null;
  /** What was drawn: lists of [x, y]. */
  strokes = [];

  /** `onStroke` is told of the end of each stroke. */
  constructor(canvas, onStroke) {
    this.#canvas = canvas;
    canvas.addEventListener("pointerdown", (event) => {
      if (this.#pointer !== null || event.button !== 0) return;
      this.#pointer = event.pointerId;
      canvas.setPointerCapture(event.pointerId);
      this.strokes.push([]);
      this.#add(event);
    });
    canvas.addEventListener("pointermove", (event) => {
      if (event.pointerId === this.#pointer) this.#add(event);
    });
    // Also when the browser takes the pointer away.
    canvas.addEventListener("lostpointercapture", () => {
      this.#pointer = null;
      onStroke();
    });
  }

  #add({ offsetX, offsetY }) {
    const { width, height, clientWidth, clientHeight } = this.#canvas;
    // Wiped while it was drawn: it begins again here.
    if (!this.strokes.length) this.strokes.push([]);
    this.strokes.at(-1).push([(offsetX * width) / clientWidth, (offsetY * height) / clientHeight]);
    this.show();
  }

  /** Draws all again, in the color that the page has now. */
  show() {
    const { width, height } = this.#canvas;
    const pen = this.#canvas.getContext("2d");
    pen.clearRect(0, 0, width, height);
    pen.lineWidth = width / 10;
    pen.strokeStyle = getComputedStyle(this.#canvas).color;
    ink(pen, this.strokes);
  }

  wipe() {
    this.strokes = [];
    this.show();
  }
}
