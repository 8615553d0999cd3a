import { $, explain, gpuName } from "./demo.js";
import { WebGPUUnavailableError } from "./torch-webgpu.js";

const adapter = await navigator.gpu?.requestAdapter();
if (adapter) $("#gpu").textContent = `Your GPU: ${gpuName(adapter.info)}`;
else explain(new WebGPUUnavailableError(navigator.gpu ? "no GPU was found" : "navigator.gpu is missing"));
document.body.dataset.ready = "true";
