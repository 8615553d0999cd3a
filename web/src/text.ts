/**
 * Language models that `export_pipeline` wrote.
 *
 *     import { textGeneration } from "./torch-webgpu-text.js";
 *     const writer = await textGeneration("model/");
 *     for await (const piece of writer.generate("Once upon a time")) output.append(piece);
 */

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { opened, tokenizerOf } from "./bundled.js";
import { InputError, type LoadOptions, type Model } from "./index.js";
import { type PieceOptions, type Step, Turns, pieces, stepOf, tokensFrom } from "./pieces.js";

/** What was said in a chat. */
export interface Message { role: string; content: string }

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

interface Description {
  task: "text-generation";
  prompt: number;
  length: number;
  end: number[];
  chat_template: string | null;
  special: Record<string, string>;
  sampling: { temperature: number; topK: number; topP: number };
}

/** Writes text. `textGeneration` makes it. */
export class TextGenerator {
  private readonly turns = new Turns();

  /** @internal For `textGeneration`. */
  constructor(readonly model: Model, private readonly tokenizer: Tokenizer, private readonly about: Description) {}

  /**
   * The numbers of the tokens of a text, or of a chat with what begins the answer.
   *
   * @throws InputError there is nothing, or the tokenizer has no template of chats.
   */
  encode(prompt: string | readonly Message[]): number[] {
    if (typeof prompt === "string") return this.tokenizer.encode(prompt).ids;
    if (!this.about.chat_template) throw new InputError("the model's tokenizer has no chat template; give a text");
    const template = new Template(this.about.chat_template);
    const text = template.render({ messages: prompt, add_generation_prompt: true, ...this.about.special });
    return this.tokenizer.encode(text, { add_special_tokens: false }).ids;
  }

  /**
   * What follows a text, piece by piece, each of whole characters. Of several calls, one waits for the other.
   *
   * @throws InputError the prompt has no tokens, or more than the model takes; the signal's reason.
   */
  async *generate(prompt: string | readonly Message[], options: GenerateOptions = {}): AsyncGenerator<string, void, void> {
    const ids = this.encode(prompt);
    if (!ids.length) throw new InputError("there is nothing to begin with");
    if (ids.length > this.about.prompt) {
      throw new InputError(`the prompt has ${ids.length} tokens, and the model takes ${this.about.prompt}; make it shorter`);
    }
    yield* this.turns.after(() => pieces(this.tokenizer, this.tokens(ids, options), options));
  }

  private async *tokens(ids: number[], options: GenerateOptions): AsyncGenerator<number, void, void> {
    const { sampling, length, end } = this.about;
    const { temperature, topK, topP } = { ...sampling, ...defined(options) };
    const how = { temperature, top_k: Math.min(64, topK), top_p: topP };
    const most = Math.min(options.maxTokens ?? Infinity, length - ids.length);
    if (most < 1) return;
    await this.model.resetState(); // the cache, which also counts what is in it
    const prompted = { ids: [ids], "position": ids.map((_, k) => k), ...how };
    const first = await stepOf(this.model, ids.length > 1 ? "prefill" : "decode", prompted);
    const following = (step: Step) => stepOf(this.model, "decode", { ids: step.token, "position": step["position"], ...how });
    yield* tokensFrom(first, most, end, following, options.signal);
  }

  /** Gives back what it has on the GPU. */
  destroy(): void {
    this.model.destroy();
  }
}

function defined(options: GenerateOptions): { temperature?: number; topK?: number; topP?: number } {
  const { temperature, topK, topP } = options;
  return Object.fromEntries(Object.entries({ temperature, topK, topP }).filter(([, value]) => value !== undefined));
}

/**
 * Loads a language model.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export function textGeneration(url: string | URL, options?: LoadOptions): Promise<TextGenerator> {
  return opened<Description, TextGenerator>(url, options, "text-generation", async (model, about) =>
    new TextGenerator(model, await tokenizerOf(model, Tokenizer), about));
}
