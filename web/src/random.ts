/** Seeds of random operators: see docs/bundle.md. */

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n;

function mix(value: bigint): bigint {
  value = ((value ^ (value >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  value = ((value ^ (value >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return value ^ (value >> 31n);
}

export class Random {
  readonly seed: bigint;
  private drawn = 0n;

  /** By default with a seed that nobody has chosen. */
  constructor(seed: bigint | number = crypto.getRandomValues(new BigUint64Array(1))[0]!) {
    this.seed = BigInt(seed);
  }

  /** The next rows of two words. */
  draw(count: number): BigUint64Array<ArrayBuffer> {
    const key = mix((this.seed * GOLDEN + 1n) & MASK);
    return new BigUint64Array(count).map(() => mix((key + this.drawn++ * GOLDEN) & MASK));
  }
}
