/** What the runtime throws on purpose. Messages say what failed, why, and the next step. */

/** Base of all errors of this module. */
export class TorchWebGPUError extends Error {
  override name = "TorchWebGPUError";
}

/** The browser, or this machine, has no usable WebGPU. */
export class WebGPUUnavailableError extends TorchWebGPUError {
  override name = "WebGPUUnavailableError";
}

/** A bundle is damaged, of another version, or not one that may be run. */
export class BundleError extends TorchWebGPUError {
  override name = "BundleError";
}

/** A call got something that the entry does not take. */
export class InputError extends TorchWebGPUError {
  override name = "InputError";
}

/** The GPU went away; `Model.restore()` goes on. */
export class DeviceLostError extends TorchWebGPUError {
  override name = "DeviceLostError";
}

/** The GPU has not enough memory. */
export class OutOfMemoryError extends TorchWebGPUError {
  override name = "OutOfMemoryError";
}

/** A tensor of indices has one for which there is no element. */
export class IndexOutOfRangeError extends TorchWebGPUError {
  override name = "IndexOutOfRangeError";
}
