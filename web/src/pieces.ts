/** Text from tokens that a model makes one after the other. */

import type { Tokenizer } from "@huggingface/tokenizers";
import type { Model, Tensor } from "./index.js";

// In quotes: what is internal is called so, too, and gets another name when it is built.
/** What an entry gives that chooses a token. */
export type Step = { token: Tensor; "position": Tensor };

export async function stepOf(model: Model, entry: string, inputs: Parameters<Model["run"]>[1]): Promise<Step> {
  return (await model.run(entry, inputs)) as unknown as Step;
}

/** The tokens from a step's on, `most` at most, up to one that ends them, with what comes after it. */
export async function* tokensFrom(
  step: Step | null, most: number, end: readonly number[], following: (step: Step) => Promise<Step>, signal: AbortSignal | undefined,
): AsyncGenerator<number, void, void> {
  try {
    for (let left = most; step; left--) {
      signal?.throwIfAborted();
      // The next token is begun before this one is read: its number never has to come here first.
      const read = step.token.read({ keep: true }) as Promise<ArrayLike<number | bigint>>;
      const next: Step | null = left > 1 ? await following(step) : null;
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

export interface PieceOptions {
  /** Texts that end it, which are not given. */
  stop?: readonly string[];
  /** Ends it. */
  signal?: AbortSignal;
  /** Told how many tokens there are, with each. */
  onToken?: (count: number) => void;
}

/** The text of tokens, in pieces of whole characters. */
export async function* pieces(
  tokenizer: Tokenizer, tokens: AsyncIterable<number>, { stop = [], signal, onToken }: PieceOptions,
): AsyncGenerator<string, void, void> {
  const written: number[] = [];
  const textOf = () => (written.length ? tokenizer.decode(written, { skip_special_tokens: true }) : "");
  let given = 0; // characters
  for await (const id of tokens) {
    signal?.throwIfAborted();
    written.push(id);
    onToken?.(written.length);
    if (written.length % 16 === 0) await new Promise((resolve) => setTimeout(resolve)); // clicks come through
    const text = textOf();
    const end = Math.min(...stop.map((each) => text.indexOf(each)).filter((at) => at >= 0));
    // What may be a part of a character, or of a text that ends it, waits.
    const whole = end < Infinity ? end : text.length - waiting(text, stop);
    if (whole > given) yield text.slice(given, whole);
    given = Math.max(given, whole);
    if (end < Infinity) return;
  }
  const rest = textOf().slice(given);
  if (rest) yield rest;
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

/** Has calls of one model follow each other. */
export class Turns {
  private last: Promise<unknown> = Promise.resolve();

  async *after<T>(pieces: () => AsyncGenerator<T, void, void>): AsyncGenerator<T, void, void> {
    let done = () => {};
    const before = this.last;
    this.last = new Promise<void>((resolve) => (done = resolve));
    try {
      await before;
      yield* pieces();
    } finally {
      done();
    }
  }
}
