/**
 * Sound as an input, and speech to text with models that `export_pipeline` wrote.
 *
 *     import { recordSound, speechRecognition } from "./torch-webgpu-audio.js";
 *     const listener = await speechRecognition("model/");
 *     const recording = await recordSound(); // from the microphone
 *     button.onclick = async () => { for await (const piece of listener.transcribe(await recording.stop())) output.append(piece); };
 */

import type { Model, LoadOptions } from "./torch-webgpu.js";
/** Sound: decoded, a file, or samples of one channel at the rate that is asked for. */
export type Sound = AudioBuffer | Blob | ArrayBuffer | Float32Array;
export interface TranscribeOptions extends PieceOptions {
    /** Of what is said, as "en", for a model of several. */
    language?: string;
    /** `translate`: into English; `transcribe` by default. */
    task?: string;
}
/**
 * Samples of one channel, -1 to 1.
 *
 * @param rate samples a second.
 * @throws InputError there is no sound in it.
 */
export declare function samples(sound: Sound, rate: number): Promise<Float32Array>;
/** Sound that is being recorded. */
export interface Recording {
    /** Ends it; the sound so far. */
    stop: () => Promise<Blob>;
}
/**
 * Records from the microphone, for which the browser asks the visitor.
 *
 * @throws DOMException there is none, or the visitor does not want it.
 */
export declare function recordSound(constraints?: MediaTrackConstraints): Promise<Recording>;
/** Writes down what is said. `speechRecognition` makes it. */
export declare class SpeechRecognizer {
    readonly model: Model;
    private readonly tokenizer;
    private readonly about;
    private readonly turns;
    /** Those that `transcribe` takes; none for a model of one. */
    get languages(): string[];
    /**
     * What is said, piece by piece. Longer sound than the model hears at once (30 s) is cut where it is quiet.
     *
     * @throws InputError there is no sound, or the model does not know the language or the task; the signal's reason.
     */
    transcribe(sound: Sound, options?: TranscribeOptions): AsyncGenerator<string, void, void>;
    private texts;
    private tokens;
    /** The tokens that a text begins with. */
    private begin;
    /** Gives back what it has on the GPU. */
    destroy(): void;
}
/**
 * Loads a model that writes down speech.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export declare function speechRecognition(url: string | URL, options?: LoadOptions): Promise<SpeechRecognizer>;
interface PieceOptions {
    /** Texts that end it, which are not given. */
    stop?: readonly string[];
    /** Ends it. */
    signal?: AbortSignal;
    /** Told how many tokens there are, with each. */
    onToken?: (count: number) => void;
}
export {};
