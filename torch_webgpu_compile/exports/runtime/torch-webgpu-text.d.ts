/**
 * Language models that `export_pipeline` wrote.
 *
 *     import { textGeneration } from "./torch-webgpu-text.js";
 *     const writer = await textGeneration("model/");
 *     for await (const piece of writer.generate("Once upon a time")) output.append(piece);
 */

import type { Model, LoadOptions } from "./torch-webgpu.js";
/** What was said in a chat. */
export interface Message {
    role: string;
    content: string;
}
export interface GenerateOptions extends PieceOptions {
    /** Of the softmax that words are drawn from; 0 takes the best word. */
    temperature?: number;
    /** Words are drawn of so many, at most 64. */
    topK?: number;
    /** Words are drawn of the best that have this share of all. */
    topP?: number;
    /** The most tokens; by default as many as the model has room for. */
    maxTokens?: number;
}
/** Writes text. `textGeneration` makes it. */
export declare class TextGenerator {
    readonly model: Model;
    private readonly tokenizer;
    private readonly about;
    private readonly turns;
    /**
     * The numbers of the tokens of a text, or of a chat with what begins the answer.
     *
     * @throws InputError there is nothing, or the tokenizer has no template of chats.
     */
    encode(prompt: string | readonly Message[]): number[];
    /**
     * What follows a text, piece by piece, each of whole characters. Of several calls, one waits for the other.
     *
     * @throws InputError the prompt has no tokens, or more than the model takes; the signal's reason.
     */
    generate(prompt: string | readonly Message[], options?: GenerateOptions): AsyncGenerator<string, void, void>;
    private tokens;
    /** Gives back what it has on the GPU. */
    destroy(): void;
}
/**
 * Loads a language model.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export declare function textGeneration(url: string | URL, options?: LoadOptions): Promise<TextGenerator>;
interface PieceOptions {
    /** Texts that end it, which are not given. */
    stop?: readonly string[];
    /** Ends it. */
    signal?: AbortSignal;
    /** Told how many tokens there are, with each. */
    onToken?: (count: number) => void;
}
export {};
