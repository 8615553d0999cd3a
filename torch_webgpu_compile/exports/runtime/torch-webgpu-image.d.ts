/**
 * Pictures as inputs and results, and classifiers that `export_pipeline` wrote.
 *
 *     import { imageClassification } from "./torch-webgpu-image.js";
 *     const classifier = await imageClassification("model/");
 *     const [{ label, score }] = await classifier.classify(document.querySelector("img"));
 */

import type { Tensor, Model, LoadOptions } from "./torch-webgpu.js";
/** What has pixels. A video gives its frame of now. */
export type Picture = ImageData | Blob | ImageBitmap | HTMLImageElement | HTMLCanvasElement | OffscreenCanvas | HTMLVideoElement | VideoFrame;
/** An input uint8 (height, width, 4): red, green, blue, opacity. */
export interface Pixels {
    data: Uint8Array;
    shape: readonly [number, number, 4];
}
export interface Label {
    label: string;
    score: number;
}
export interface ClassifyOptions {
    /** How many labels, the best first; 5 by default. */
    top?: number;
}
/**
 * The pixels of a picture, with what is transparent on white.
 *
 * @param most pixels of a side: a larger picture is made smaller.
 * @param least pixels of a side: a narrower picture is made wider.
 * @throws InputError what is given has no pixels, or not yet.
 */
export declare function pixels(picture: Picture, most?: number, least?: number): Promise<Pixels>;
/**
 * A result as a picture.
 *
 * @param result uint8 (height, width, 4) or (height, width, 3), or float32 of 0 to 1: (3, height, width) or (1, 3, height, width).
 * @throws InputError for other results.
 */
export declare function imageData(result: Tensor): Promise<ImageData>;
/** Says what is in a picture. `imageClassification` makes it. */
export declare class ImageClassifier {
    readonly model: Model;
    readonly labels: readonly string[];
    private readonly most;
    /**
     * The best labels of a picture.
     *
     * @throws InputError the picture has no pixels.
     */
    classify(picture: Picture, { top }?: ClassifyOptions): Promise<Label[]>;
    /** Gives back what it has on the GPU. */
    destroy(): void;
}
/**
 * Loads a classifier.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export declare function imageClassification(url: string | URL, options?: LoadOptions): Promise<ImageClassifier>;
export {};
