/**
 * Language models that `export_pipeline` wrote.
 *
 *     import { textGeneration } from "./torch-webgpu-text.js";
 *     const writer = await textGeneration("model/");
 *     for await (const piece of writer.generate("Once upon a time")) output.append(piece);
 */

import { Template } from "@huggingface/jinja";
import { Tokenizer } from "@huggingface/tokenizers";
import { bundled, description } from "./bundled.js";
import { InputError, type LoadOptions, type Model, type Tensor, load } from "./index.js";

/** What was said in a chat. */
export interface Message { role: string; content: string }

export interface GenerateOptions {
  /** Of the softmax that words are drawn from; 0 takes the best word. */
  temperature?: number;
  /** Words are drawn of so many, at most 64. */
  topK?: number;
  /** Words are drawn of the best that have this share of all. */
  topP?: number;
  /** The most tokens; by default as many as the model has room for. */
  maxTokens?: number;
  /** Texts that end it, which are not given. */
  stop?: readonly string[];
  /** Ends it. */
  signal?: AbortSignal;
  /** Told how many tokens there are, with each. */
  onToken?: (count: number) => void;
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

// In quotes: what is internal is called so, too, and gets another name when it is built.
type Step = { token: Tensor; "position": Tensor };

/** Writes text. `textGeneration` makes it. */
export class TextGenerator {
  private last: Promise<unknown> = Promise.resolve();

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
    let done = () => {};
    const before = this.last;
    this.last = new Promise<void>((resolve) => (done = resolve));
    try {
      await before;
      yield* this.pieces(ids, options);
    } finally {
      done();
    }
  }

  private async *pieces(ids: number[], options: GenerateOptions): AsyncGenerator<string, void, void> {
    const { stop = [], signal, onToken } = options;
    const written: number[] = [];
    let given = 0; // characters
    for await (const id of this.tokens(ids, options)) {
      signal?.throwIfAborted();
      written.push(id);
      onToken?.(written.length);
      if (written.length % 16 === 0) await new Promise((resolve) => setTimeout(resolve)); // clicks come through
      const text = this.tokenizer.decode(written, { skip_special_tokens: true });
      const end = Math.min(...stop.map((each) => text.indexOf(each)).filter((at) => at >= 0));
      // What may be a part of a character, or of a text that ends it, waits.
      const whole = end < Infinity ? end : text.length - waiting(text, stop);
      if (whole > given) yield text.slice(given, whole);
      given = Math.max(given, whole);
      if (end < Infinity) return;
    }
    const rest = written.length ? this.tokenizer.decode(written, { skip_special_tokens: true }).slice(given) : "";
    if (rest) yield rest;
  }

  private async *tokens(ids: number[], options: GenerateOptions): AsyncGenerator<number, void, void> {
    const { sampling, length, end } = this.about;
    const { temperature, topK, topP } = { ...sampling, ...defined(options) };
    const how = { temperature, top_k: Math.min(64, topK), top_p: topP };
    const most = Math.min(options.maxTokens ?? Infinity, length - ids.length);
    await this.model.resetState(); // the cache, which also counts what is in it
    const prompted = { ids: [ids], "position": ids.map((_, k) => k), ...how };
    let step: Step | null = most > 0 ? await this.step(ids.length > 1 ? "prefill" : "decode", prompted) : null;
    try {
      for (let left = most; step; left--) {
        options.signal?.throwIfAborted();
        // The next token is begun before this one is read: its number never has to come here first.
        const read = step.token.read({ keep: true }) as Promise<ArrayLike<number | bigint>>;
        const next: Step | null = left > 1 ? await this.step("decode", { ids: step.token, "position": step["position"], ...how }) : null;
        step["position"].dispose();
        const token = step.token;
        step = next;
        const id = Number((await read)[0]);
        token.dispose();
        if (end.includes(id)) return;
        yield id;
      }
    } finally {
      step?.token.dispose();
      step?.["position"].dispose();
    }
  }

  private async step(entry: string, inputs: Parameters<Model["run"]>[1]): Promise<Step> {
    return (await this.model.run(entry, inputs)) as unknown as Step;
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

/** How many last characters may change with the next token. */
function waiting(text: string, stop: readonly string[]): number {
  let most = text.endsWith("\ufffd") ? 1 : 0;
  for (const each of stop) {
    for (let count = Math.min(each.length - 1, text.length); count > most; count--) {
      if (text.endsWith(each.slice(0, count))) most = count;
    }
  }
  return most;
}

/**
 * Loads a language model.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export async function textGeneration(url: string | URL, options?: LoadOptions): Promise<TextGenerator> {
  const model = await load(url, options);
  try {
    const about = await description<Description>(model, "text-generation");
    const [rules, config] = await Promise.all(["tokenizer.json", "tokenizer_config.json"].map((name) => bundled<object>(model, name)));
    return new TextGenerator(model, new Tokenizer(rules!, config!), about);
  } catch (error) {
    model.destroy();
    throw error;
  }
}
