/** What the runtime throws on purpose. Messages say what failed, why, and the next step. */

/** Base of all errors of this module. */
export class TorchWebGPUError extends Error {}

/** The browser, or this machine, has no usable WebGPU. */
export class WebGPUUnavailableError extends TorchWebGPUError {}

/** A bundle is damaged, of another version, or not one that may be run. */
export class BundleError extends TorchWebGPUError {}

/** A call got something that the entry does not take. */
export class InputError extends TorchWebGPUError {}

/** The GPU went away; `Model.restore()` goes on. */
export class DeviceLostError extends TorchWebGPUError {}

/** The GPU has not enough memory. */
export class OutOfMemoryError extends TorchWebGPUError {}

/** A tensor of indices has one for which there is no element. */
export class IndexOutOfRangeError extends TorchWebGPUError {}

const KINDS = {
  TorchWebGPUError, WebGPUUnavailableError, BundleError, InputError, DeviceLostError, OutOfMemoryError, IndexOutOfRangeError,
};
// Minified classes have other names.
for (const [name, kind] of Object.entries(KINDS)) kind.prototype.name = name;
