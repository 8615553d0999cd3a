/**
 * Pictures as inputs and results, and classifiers that `export_pipeline` wrote.
 *
 *     import { imageClassification } from "./torch-webgpu-image.js";
 *     const classifier = await imageClassification("model/");
 *     const [{ label, score }] = await classifier.classify(document.querySelector("img"));
 */

import { kindOf, opened } from "./bundled.js";
import { InputError, type LoadOptions, type Model, type Tensor } from "./index.js";

/** What has pixels. A video gives its frame of now. */
export type Picture = ImageData | Blob | ImageBitmap | HTMLImageElement | HTMLCanvasElement | OffscreenCanvas | HTMLVideoElement | VideoFrame;

/** An input uint8 (height, width, 4): red, green, blue, opacity. */
export interface Pixels { data: Uint8Array; shape: readonly [number, number, 4] }

export interface Label { label: string; score: number }

export interface ClassifyOptions {
  /** How many labels, the best first; 5 by default. */
  top?: number;
}

interface Description { task: "image-classification"; most_pixels: number; labels: string[] }

/**
 * The pixels of a picture, with what is transparent on white.
 *
 * @param most pixels of a side: a larger picture is made smaller.
 * @param least pixels of a side: a narrower picture is made wider.
 * @throws InputError what is given has no pixels, or not yet.
 */
export async function pixels(picture: Picture, most = 4096, least = 1): Promise<Pixels> {
  const fits = ({ width, height }: ImageData) => Math.max(width, height) <= most && Math.min(width, height) >= least;
  if (globalThis.ImageData && picture instanceof ImageData && fits(picture) && isOpaque(picture)) {
    return { data: new Uint8Array(picture.data), shape: [picture.height, picture.width, 4] };
  }
  const source = await drawable(picture);
  try {
    const [width, height] = sizeOf(source);
    if (!(width && height)) throw new InputError("the picture has no pixels; wait until it is loaded");
    const scale = Math.min(1, most / Math.max(width, height));
    const [w, h] = [width, height].map((side) => Math.max(least, Math.round(side * scale))) as [number, number];
    const context = new OffscreenCanvas(w, h).getContext("2d", { willReadFrequently: true })!;
    context.imageSmoothingQuality = "high";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, w, h);
    context.drawImage(source, 0, 0, w, h);
    return { data: new Uint8Array(context.getImageData(0, 0, w, h).data), shape: [h, w, 4] };
  } finally {
    if (source !== picture) (source as ImageBitmap).close();
  }
}

function isOpaque({ data }: ImageData): boolean {
  for (let k = 3; k < data.length; k += 4) if (data[k] !== 255) return false;
  return true;
}

async function drawable(picture: Picture): Promise<Exclude<Picture, ImageData | Blob>> {
  const kinds = ["ImageBitmap", "HTMLImageElement", "HTMLCanvasElement", "OffscreenCanvas", "HTMLVideoElement", "VideoFrame"];
  const isA = (name: string) => {
    const kind = (globalThis as Record<string, unknown>)[name];
    return typeof kind === "function" && picture instanceof kind;
  };
  if (isA("ImageData") || isA("Blob")) {
    return createImageBitmap(picture as ImageData | Blob).catch((error: Error) => {
      throw new InputError(`the picture cannot be decoded (${error.message}); give a file of an image`);
    });
  }
  if (!kinds.some(isA)) {
    throw new InputError(`${kindOf(picture)} has no pixels; give ImageData, a Blob, or one of ${kinds.join(", ")}`);
  }
  return picture as Exclude<Picture, ImageData | Blob>;
}

function sizeOf(source: Exclude<Picture, ImageData | Blob>): [number, number] {
  if ("naturalWidth" in source) return [source.naturalWidth, source.naturalHeight];
  if ("videoWidth" in source) return [source.videoWidth, source.videoHeight];
  if ("displayWidth" in source) return [source.displayWidth, source.displayHeight];
  return [source.width, source.height];
}

/**
 * A result as a picture.
 *
 * @param result uint8 (height, width, 4) or (height, width, 3), or float32 of 0 to 1: (3, height, width) or (1, 3, height, width).
 * @throws InputError for other results.
 */
export async function imageData(result: Tensor): Promise<ImageData> {
  const sizes = result.shape.length === 4 && result.shape[0] === 1 ? result.shape.slice(1) : result.shape;
  const isRows = result.dtype === "uint8" && sizes.length === 3 && (sizes[2] === 3 || sizes[2] === 4);
  if (!isRows && !(result.dtype === "float32" && sizes.length === 3 && sizes[0] === 3)) {
    throw new InputError(`${result.dtype} [${result.shape}] is no picture: give uint8 [height, width, 4] or float32 [3, height, width]`);
  }
  const [height, width] = (isRows ? sizes : sizes.slice(1)) as [number, number];
  const made = new ImageData(width, height);
  const values = (await result.read()) as ArrayLike<number>;
  const count = width * height;
  const channels = isRows ? sizes[2]! : 3;
  for (let k = 0; k < count; k++) {
    for (let channel = 0; channel < channels; channel++) {
      const value = values[isRows ? channels * k + channel : channel * count + k]!;
      made.data[4 * k + channel] = isRows ? value : 255 * value; // which is rounded, and kept within 0 to 255
    }
    if (channels === 3) made.data[4 * k + 3] = 255;
  }
  return made;
}

/** Says what is in a picture. `imageClassification` makes it. */
export class ImageClassifier {
  /** @internal For `imageClassification`. */
  constructor(readonly model: Model, readonly labels: readonly string[], private readonly most: number) {}

  /**
   * The best labels of a picture.
   *
   * @throws InputError the picture has no pixels.
   */
  async classify(picture: Picture, { top = 5 }: ClassifyOptions = {}): Promise<Label[]> {
    const { scores } = (await this.model.run("forward", { image: await pixels(picture, this.most, 2) })) as { scores: Tensor };
    const found = Array.from((await scores.read()) as Float32Array, (score, k) => ({ label: this.labels[k] ?? String(k), score }));
    return found.sort((a, b) => b.score - a.score).slice(0, top);
  }

  /** Gives back what it has on the GPU. */
  destroy(): void {
    this.model.destroy();
  }
}

/**
 * Loads a classifier.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export function imageClassification(url: string | URL, options?: LoadOptions): Promise<ImageClassifier> {
  return opened<Description, ImageClassifier>(url, options, "image-classification", (model, { labels, most_pixels: most }) =>
    new ImageClassifier(model, labels, most));
}
