/** Seeds of random operators: see docs/bundle.md. */

const MASK = (1n << 64n) - 1n;
const GOLDEN = 0x9e3779b97f4a7c15n;

function mix(value: bigint): bigint {
  value = ((value ^ (value >> 30n)) * 0xbf58476d1ce4e5b9n) & MASK;
  value = ((value ^ (value >> 27n)) * 0x94d049bb133111ebn) & MASK;
  return value ^ (value >> 31n);
}

export class Random {
  private readonly key: bigint;
  private drawn = 0n;

  constructor(seed: bigint | number) {
    this.key = mix((BigInt(seed) * GOLDEN + 1n) & MASK);
  }

  /** The next rows of two words. */
  draw(count: number): BigUint64Array<ArrayBuffer> {
    const rows = new BigUint64Array(count);
    for (let k = 0; k < count; k++) rows[k] = mix((this.key + this.drawn++ * GOLDEN) & MASK);
    return rows;
  }
}

/** A seed that nobody has chosen. */
export const randomSeed = (): bigint => crypto.getRandomValues(new BigUint64Array(1))[0]!;
