/** Composed plans: their types, and whether what was fetched is one that fits its entry. */

import { type Check, below, count, demand, dtype, fields, list, oneOf, optional, record, refuse, table, text } from "./checks.js";
import { type Expr, type NumberValue, exprOf } from "./expressions.js";
import type { Entry, Variant } from "./manifest.js";
import { FIRST_CHECK, type Plan, type PlanBuffer, type Role, VERSION, checkParts, planOf, same } from "./plan.js";
import { type Scalar, pythonNumberOf, scalar } from "./python.js";

/** The place of a size symbol's value among the arguments, as `coefficient` times the symbol, plus `constant`. */
export interface Source {
  symbol: string; position: number; field: "size" | "stride" | "offset" | ""; dim: number; coefficient: number; constant: number;
}
/** A result: one of a plan's outputs in memory, or a name; or a number that sizes give; or a constant. */
export interface Result { output: number | null; size: Expr | null; constant: Scalar | null; mutates: number | null }

interface Common {
  name: string;
  /** Of each argument: the buffer that it is, or null for a number, or for what is not read. */
  inputs: (string | null)[];
  sources: Source[];
  results: Result[];
}
/** A nested plan of kernels; its outputs are only those in memory. */
export interface Kernels extends Common { plan: Plan; changed: ReadonlySet<number> }
export interface Composed extends Common {
  plans: Nested[]; steps: Step[];
  /** Of each result: its name. */
  returned: (string | null)[];
  /** Of each step: the names that nobody reads after it. */
  dead: string[][];
}
export type Nested = Kernels | Composed;

interface Call { arguments: string[]; results: string[] }
export type Step =
  | ({ kind: "Run"; plan: number } & Call)
  | ({ kind: "Branch"; index: string; plans: number[] } & Call)
  | { kind: "Loop"; body: number; condition: number | null; count: string | null; carried: string[]; others: string[]; results: string[]; stacked: number[] }
  | { kind: "ReadNumber"; buffer: string; name: string }
  | { kind: "SizeOf"; buffer: string; field: "size" | "stride"; dim: number; name: string }
  | { kind: "Compute"; name: string; value: NumberValue }
  | { kind: "Floats"; name: string; numbers: string[] }
  | { kind: "Seeds"; name: string; count: number }
  | { kind: "Check"; condition: string; message: string };

const MOST_DEPTH = 16;
const MOST_SEEDS = 1 << 20;

/** Notes the names that it is asked for. */
function noting(): { has: (name: string) => boolean; found: Set<string> } {
  const found = new Set<string>();
  return { found, has: (name) => typeof name === "string" && !!found.add(name) };
}

const names = list(text);
const call = { arguments: names, results: names };
const STEPS: Record<Step["kind"], Check<any>> = {
  Run: fields({ plan: count, ...call }),
  Branch: fields({ index: text, plans: list(count), ...call }),
  Loop: fields({ body: count, condition: optional(count), count: optional(text), carried: names, others: names, results: names, stacked: list(count) }),
  ReadNumber: fields({ buffer: text, name: text }),
  SizeOf: fields({ buffer: text, field: oneOf("size", "stride"), dim: below(64), name: text }),
  Compute: fields({ name: text, value: pythonNumberOf({ has: (name) => typeof name === "string" }) }),
  Floats: fields({ name: text, numbers: names }),
  Seeds: fields({ name: text, count: below(MOST_SEEDS) }),
  Check: fields({ condition: text, message: text }),
};
const step: Check<Step> = (data, at) => {
  const [kind, ...others] = Object.keys(record(data, at));
  const check = Object.hasOwn(STEPS, kind ?? "") && !others.length ? STEPS[kind as Step["kind"]] : null;
  return check ? { kind, ...check((data as any)[kind!], `${at}.${kind}`) } : refuse(at, `is ${kind}, which is no step that a page runs`);
};

/** The names in a number. */
function namesIn(value: NumberValue): Set<string> {
  const { has, found } = noting();
  pythonNumberOf({ has })(value, "");
  return found;
}

/** What a step reads, and what it gives names to. */
export function namesOf(step: Step): [reads: string[], makes: string[]] {
  switch (step.kind) {
    case "Run": return [step.arguments, step.results];
    case "Branch": return [[step.index, ...step.arguments], step.results];
    case "Loop": return [[...(step.count === null ? [] : [step.count]), ...step.carried, ...step.others], step.results];
    case "ReadNumber": case "SizeOf": return [[step.buffer], [step.name]];
    case "Compute": return [[...namesIn(step.value)], [step.name]];
    case "Floats": return [step.numbers, [step.name]];
    case "Seeds": return [[], [step.name]];
    case "Check": return [[step.condition], []];
  }
}

type Layouts = Record<string, Pick<PlanBuffer, "sizes" | "strides" | "offset">>;

/** Where the values of size symbols are. */
function sourcesOf(inputs: readonly { buffer: string | null; size: Expr | null }[], buffers: Layouts): Source[] {
  const found = new Map<string, Source>();
  const add = (position: number, field: Source["field"], dim: number, expr: Expr): void => {
    if (typeof expr === "number" || expr.t.length !== 1) return;
    const [coefficient, ...atoms] = expr.t[0]!;
    const [atom] = atoms;
    if (atoms.length !== 1 || atom!.length !== 2 || found.has(atom![0]) || !coefficient) return;
    found.set(atom![0], { symbol: atom![0], position, field, dim, coefficient, constant: expr.c });
  };
  inputs.forEach(({ size }, k) => size !== null && add(k, "", 0, size));
  inputs.forEach(({ buffer }, k) => buffer !== null && buffers[buffer]!.sizes.forEach((size, dim) => add(k, "size", dim, size)));
  inputs.forEach(({ buffer }, k) => {
    if (buffer === null) return;
    buffers[buffer]!.strides.forEach((stride, dim) => add(k, "stride", dim, stride));
    add(k, "offset", 0, buffers[buffer]!.offset);
  });
  return [...found.values()];
}

/** Inputs, and what outputs are but for their layouts. */
const ends = (expr: Check<Expr>) => fields({
  name: text,
  inputs: list(fields<{ buffer: string | null; size: Expr | null }>({ buffer: optional(text), size: optional(expr) })),
  outputs: list(fields<{ buffer: string | null; size: Expr | null; constant: Scalar | null; mutates: number | null }>({
    buffer: optional(text), size: optional(expr), constant: scalar, mutates: optional(count),
  })),
});

function kernelsOf(data: Record<string, unknown>, at: string, modules: number): Kernels {
  const used = noting();
  const { name, inputs, outputs } = ends(exprOf(used))(data, at);
  const inMemory = (data.outputs as { buffer: unknown }[]).filter(({ buffer }) => buffer !== null);
  const plan = planOf(used)({ ...data, outputs: inMemory }, at);
  demand(plan.preparation === null, at, "prepares something in a plan that another one runs");
  checkParts(plan, at, modules, ["input", "constant"]);
  const sources = sourcesOf(inputs, plan.buffers);
  const given = new Set(sources.map(({ symbol }) => symbol));
  for (const symbol of used.found) demand(given.has(symbol) && symbol !== FIRST_CHECK, at, `has the size ${symbol} of no input`);
  let position = 0;
  const results = outputs.map(({ buffer, ...others }) => ({ ...others, output: buffer === null ? null : position++ }));
  const changed = outputs.flatMap(({ buffer, mutates }) => (mutates !== null && buffer === inputs[mutates]?.buffer ? mutates : []));
  return { name, plan, inputs: inputs.map(({ buffer }) => buffer), sources, results, changed: new Set(changed) };
}

function composedOf(data: Record<string, unknown>, at: string, modules: number, depth: number): Composed {
  demand(depth < MOST_DEPTH, at, "is nested too deeply");
  demand(data.version === VERSION, at, `is not of the version ${VERSION} that this runtime reads`);
  const isEmpty = (part: unknown): boolean => Array.isArray(part) && !part.length;
  demand(isEmpty(data.kernels) && data.preparation === null, at, "has kernels of its own, and runs other plans");
  const used = noting();
  const expr = exprOf(used);
  const { name, inputs, outputs } = ends(expr)(data, at);
  const layout = fields<Omit<PlanBuffer, "slot">>({
    role: oneOf<Role>("input"), dtype, sizes: list(expr, 64), strides: list(expr, 64), offset: expr, nbytes: expr,
  });
  const buffers = table(layout)(data.buffers, `${at}.buffers`);
  const steps = list(step)(data.steps, `${at}.steps`);
  demand(same(inputs.flatMap(({ buffer }) => buffer ?? []).sort(), Object.keys(buffers).sort()), at, "has inputs that nothing gives");
  const sources = sourcesOf(inputs, buffers);
  const given = new Set(sources.map(({ symbol }) => symbol));
  for (const symbol of used.found) demand(given.has(symbol), at, `has the size ${symbol} of no input`);
  const plans = list<Nested>((part, place) => nestedOf(part, place, modules, depth + 1))(data.plans, `${at}.plans`);
  return {
    name, plans, steps, sources,
    inputs: inputs.map(({ buffer }) => buffer),
    results: outputs.map(({ buffer, ...others }, k) => ({ ...others, output: buffer === null ? null : k })),
    returned: outputs.map(({ buffer }) => buffer),
    dead: deadAfter(steps, outputs.flatMap(({ buffer }) => buffer ?? [])),
  };
}

function nestedOf(data: unknown, at: string, modules: number, depth: number): Nested {
  const given = record(data, at);
  if (given.plans === null) return kernelsOf(given, at, modules);
  const found = composedOf(given, at, modules, depth);
  kindsOf(found, at);
  return found;
}

function deadAfter(steps: readonly Step[], returned: readonly string[]): string[][] {
  const kept = new Set(returned);
  return steps.map(namesOf).reverse().map(([reads, makes]) => {
    const last = [...new Set([...reads, ...makes])].filter((name) => name && !kept.has(name));
    last.forEach((name) => kept.add(name));
    return last;
  }).reverse();
}

const isComposed = (plan: Nested): plan is Composed => "plans" in plan;

/** Of each result of a plan whether it is a number, or nothing. */
function numbersOf(plan: Nested, at: string): boolean[] {
  return isComposed(plan) ? kindsOf(plan, at) : plan.results.map(({ output }) => output === null);
}

const known = new WeakMap<Composed, boolean[]>();

/** Checks that a composed plan's names are there, and of the kind that they are used as; gives what `numbersOf` does. */
function kindsOf(plan: Composed, at: string): boolean[] {
  const before = known.get(plan);
  if (before) return before;
  const need = (condition: boolean, what: string): void => demand(condition, at, what);
  /** Whether each name is a number. */
  const kinds = new Map<string, boolean>();
  const isNumber = (name: string): boolean => kinds.get(name) ?? refuse(at, `uses ${name} before it is there`);
  const add = (name: string, kind: boolean): void => {
    need(!kinds.has(name), `names two values ${name}`);
    if (name) kinds.set(name, kind);
  };
  const tensor = (name: string): void => need(!isNumber(name), `uses ${name}, a number, as a tensor`);
  const call = (number: number, given: readonly string[], results: number): boolean[] => {
    const inner = plan.plans[number] ?? refuse(at, `has no plan ${number}`);
    need(given.length === inner.inputs.length && results === inner.results.length, `runs ${inner.name} with other arguments or results`);
    const wanted = new Set(inner.sources.filter(({ field }) => !field).map(({ position }) => position));
    given.forEach((name, k) => {
      if (inner.inputs[k] !== null) tensor(name);
      else need(isNumber(name) || !wanted.has(k), `gives ${name}, a tensor, for a number`);
    });
    return numbersOf(inner, at);
  };

  plan.inputs.forEach((name) => name !== null && add(name, false));
  plan.sources.forEach(({ symbol }) => add(symbol, true));
  for (const step of plan.steps) {
    const [reads, makes] = namesOf(step);
    reads.forEach(isNumber);
    let made = makes.map(() => true);
    if (step.kind === "Run") made = call(step.plan, step.arguments, makes.length);
    else if (step.kind === "Branch") {
      need(step.plans.length > 0, "chooses among no plans");
      const found = step.plans.map((plan) => call(plan, step.arguments, makes.length));
      made = found[0]!;
      need(found.every((kinds) => same(kinds, made)), "has branches with results of other kinds");
    } else if (step.kind === "Loop") {
      const given = [...step.carried, ...step.others];
      made = call(step.body, given, step.carried.length);
      need(makes.length === made.length && same(made, step.carried.map(isNumber)), "has a loop whose turns give other values than they take");
      need((step.condition === null) !== (step.count === null), "has a loop without an end");
      if (step.condition !== null) call(step.condition, given, 1);
      else need(isNumber(step.count!), "counts turns with a tensor");
      for (const k of step.stacked) need(made[k] === false, "stacks what is no tensor");
    } else if (step.kind === "ReadNumber" || step.kind === "SizeOf") tensor(step.buffer);
    else if (step.kind === "Floats" || step.kind === "Seeds") made = [false];
    if (step.kind === "Floats" || step.kind === "Compute" || step.kind === "Check") {
      for (const name of reads) need(isNumber(name), `computes with ${name}, a tensor`);
    }
    makes.forEach((name, k) => name && add(name, made[k]!));
  }
  plan.returned.forEach((name, k) => {
    const { mutates } = plan.results[k]!;
    if (name !== null) isNumber(name);
    need(mutates === null || (plan.inputs[mutates] != null && name !== null && !isNumber(name)), `changes argument ${mutates}, which is no tensor`);
  });
  const found = plan.returned.map((name) => name === null || isNumber(name));
  known.set(plan, found);
  return found;
}

/**
 * The composed plan in parsed JSON.
 *
 * @param at the file that it is from.
 * @param modules how many WGSL modules there are.
 * @throws BundleError for anything that is none, or does not fit the entry or the variant's state.
 */
export function checkComposed(data: unknown, at: string, entry: Entry, { state }: Variant, modules: number): Composed {
  const given = record(data, at);
  const plan = composedOf(given, at, modules, 0);
  const isNumber = kindsOf(plan, at);
  const need = (condition: boolean, what: string): void => demand(condition, at, what);
  need(entry.arguments.length === plan.inputs.length, "takes other arguments");
  const buffers = given.buffers as Record<string, PlanBuffer>;
  entry.arguments.forEach(({ input, state: name }, k) => {
    const wanted = input !== null ? entry.inputs[input] : state[name!];
    const buffer = plan.inputs[k] ?? refuse(at, `takes an argument ${k} that is no tensor`);
    if (!wanted) return;
    need(same(buffers[buffer]!.sizes, wanted.sizes) && buffers[buffer]!.dtype === wanted.dtype, `takes an argument ${k} of another dtype or size`);
  });
  const seen = new Set<number>();
  const returned = [...plan.results.keys()].filter((k) => {
    const { mutates } = plan.results[k]!;
    if (mutates === null) return true;
    const isState = state[entry.arguments[mutates]?.state ?? ""]?.changes;
    need(!!isState && !seen.has(mutates), `changes argument ${mutates}, which does not change`);
    seen.add(mutates);
    return false;
  });
  for (const [name, { output }] of Object.entries(entry.results)) {
    need(output === null || isNumber[returned[output] ?? -1] === false, `has no output for the result ${name}`);
  }
  return plan;
}
