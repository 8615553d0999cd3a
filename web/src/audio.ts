/**
 * Sound as an input, and speech to text with models that `export_pipeline` wrote.
 *
 *     import { recordSound, speechRecognition } from "./torch-webgpu-audio.js";
 *     const listener = await speechRecognition("model/");
 *     const recording = await recordSound(); // from the microphone
 *     button.onclick = async () => { for await (const piece of listener.transcribe(await recording.stop())) output.append(piece); };
 */

import { Tokenizer } from "@huggingface/tokenizers";
import { kindOf, opened, tokenizerOf } from "./bundled.js";
import { InputError, type LoadOptions, type Model } from "./index.js";
import { type PieceOptions, type Step, Turns, pieces, stepOf, tokensFrom } from "./pieces.js";

/** Sound: decoded, a file, or samples of one channel at the rate that is asked for. */
export type Sound = AudioBuffer | Blob | ArrayBuffer | Float32Array;

export interface TranscribeOptions extends PieceOptions {
  /** Of what is said, as "en", for a model of several. */
  language?: string;
  /** `translate`: into English; `transcribe` by default. */
  task?: string;
}

interface Description {
  task: "automatic-speech-recognition";
  rate: number;
  samples: number;
  length: number;
  begin: number[];
  end: number[];
  language: string;
  languages: Record<string, number>;
  tasks: Record<string, number>;
}

/**
 * Samples of one channel, -1 to 1.
 *
 * @param rate samples a second.
 * @throws InputError there is no sound in it.
 */
export async function samples(sound: Sound, rate: number): Promise<Float32Array> {
  if (sound instanceof Float32Array) return sound;
  const decoded = sound instanceof AudioBuffer ? sound : await decode(sound, rate);
  if (decoded.numberOfChannels === 1 && decoded.sampleRate === rate) return decoded.getChannelData(0);
  const context = new OfflineAudioContext(1, Math.max(1, Math.round(decoded.duration * rate)), rate);
  const source = new AudioBufferSourceNode(context, { buffer: decoded });
  source.connect(context.destination); // which mixes channels
  source.start();
  return (await context.startRendering()).getChannelData(0);
}

async function decode(sound: Blob | ArrayBuffer, rate: number): Promise<AudioBuffer> {
  const isFile = sound instanceof Blob;
  if (!isFile && !(sound instanceof ArrayBuffer)) {
    throw new InputError(`${kindOf(sound)} is no sound; give an AudioBuffer, a file, or samples as a Float32Array`);
  }
  const data = isFile ? await sound.arrayBuffer() : sound.slice(0); // which is taken
  return new OfflineAudioContext(1, 1, rate).decodeAudioData(data).catch((error: Error) => {
    throw new InputError(`the sound cannot be decoded (${error.message || error.name}); give a file that the browser plays`);
  });
}

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
export async function recordSound(constraints: MediaTrackConstraints = {}): Promise<Recording> {
  const stream = await navigator.mediaDevices.getUserMedia({ audio: constraints });
  const recorder = new MediaRecorder(stream);
  const parts: Blob[] = [];
  recorder.ondataavailable = ({ data }) => parts.push(data);
  const ended = new Promise((resolve) => (recorder.onstop = resolve));
  recorder.start();
  return {
    async stop() {
      if (recorder.state !== "inactive") recorder.stop();
      await ended;
      for (const track of stream.getTracks()) track.stop();
      return new Blob(parts, { type: recorder.mimeType });
    },
  };
}

/** Writes down what is said. `speechRecognition` makes it. */
export class SpeechRecognizer {
  private readonly turns = new Turns();

  /** @internal For `speechRecognition`. */
  constructor(readonly model: Model, private readonly tokenizer: Tokenizer, private readonly about: Description) {}

  /** Those that `transcribe` takes; none for a model of one. */
  get languages(): string[] {
    return Object.keys(this.about.languages);
  }

  /**
   * What is said, piece by piece. Longer sound than the model hears at once (30 s) is cut where it is quiet.
   *
   * @throws InputError there is no sound, or the model does not know the language or the task; the signal's reason.
   */
  async *transcribe(sound: Sound, options: TranscribeOptions = {}): AsyncGenerator<string, void, void> {
    const begin = this.begin(options);
    const all = await samples(sound, this.about.rate);
    if (!all.length) throw new InputError("the sound has no samples");
    yield* this.turns.after(() => this.texts(all, begin, options));
  }

  private async *texts(all: Float32Array, begin: number[], options: TranscribeOptions): AsyncGenerator<string, void, void> {
    const { rate, samples: most } = this.about;
    let before = 0; // tokens
    for (let at = 0; at < all.length; ) {
      options.signal?.throwIfAborted();
      const count = all.length - at > most ? quietest(all.subarray(at, at + most), rate) : all.length - at;
      const heard = new Float32Array(most);
      heard.set(all.subarray(at, at + count));
      const so = before;
      const onToken = (made: number) => options.onToken?.((before = so + made));
      yield* pieces(this.tokenizer, this.tokens(heard, begin, options.signal), { ...options, onToken });
      at += count;
    }
  }

  private async *tokens(heard: Float32Array, begin: number[], signal: AbortSignal | undefined): AsyncGenerator<number, void, void> {
    const { length, end } = this.about;
    const first = await stepOf(this.model, "listen", { samples: heard, ids: [begin] });
    const following = (step: Step) => stepOf(this.model, "decode", { ids: step.token, "position": step["position"] });
    yield* tokensFrom(first, length - begin.length, end, following, signal);
  }

  /** The tokens that a text begins with. */
  private begin({ language = this.about.language, task = "transcribe" }: TranscribeOptions): number[] {
    const { begin, languages, tasks } = this.about;
    const made = [...begin];
    for (const [k, [kind, name, known]] of ([["language", language, languages], ["task", task, tasks]] as const).entries()) {
      if (!Object.keys(known).length) continue;
      if (!(name in known)) throw new InputError(`the model does not know the ${kind} ${name}; it knows ${Object.keys(known).join(", ")}`);
      made[k + 1] = known[name]!;
    }
    return made;
  }

  /** Gives back what it has on the GPU. */
  destroy(): void {
    this.model.destroy();
  }
}

/** How many samples are before the quietest tenth of a second of the last sixth. */
function quietest(part: Float32Array, rate: number): number {
  const width = Math.max(1, Math.round(rate / 10));
  let best = part.length;
  let least = Infinity;
  for (let end = part.length; end - width >= (5 / 6) * part.length; end -= width) {
    let sum = 0;
    for (let k = end - width; k < end; k++) sum += part[k]! ** 2;
    if (sum < least) [least, best] = [sum, end - (width >> 1)];
  }
  return best;
}

/**
 * Loads a model that writes down speech.
 *
 * @param url of the bundle's folder, relative to the page.
 * @throws TypeError the bundle is of another kind; and what `load` throws.
 */
export function speechRecognition(url: string | URL, options?: LoadOptions): Promise<SpeechRecognizer> {
  return opened<Description, SpeechRecognizer>(url, options, "automatic-speech-recognition", async (model, about) =>
    new SpeechRecognizer(model, await tokenizerOf(model, Tokenizer), about));
}
