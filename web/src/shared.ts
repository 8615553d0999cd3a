/** What the module of composed plans, which pages fetch when they need it, has from the runtime: see build.mjs. */

export { below, count, demand, fields, is, list, oneOf, optional, record, refuse, table, text, dtype } from "./checks.js";
export { decode, itemsize } from "./dtypes.js";
export { BundleError, InputError } from "./errors.js";
export { evaluate, exprOf, numberOf } from "./expressions.js";
export { rounded } from "./gpu.js";
export { readInputs } from "./inputs.js";
export { inRows, numel, rows, span } from "./layout.js";
export { FIRST_CHECK, VERSION, checkParts, planOf, same } from "./plan.js";
export { Tensor } from "./tensor.js";
